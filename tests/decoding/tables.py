"""Tabulated targets and drafts over tiny vocabularies: p and q are functions of the context."""

import torch
from torch import Tensor

from nde_talf import DecodingState, Drafter, DraftTree
from nde_talf.decoding.setting import RAW
from nde_talf.decoding.tree import Verdict

V = 3
KINDS = ("random", "sparse", "equal", "disjoint", "one-hot p", "one-hot q", "close")


class Tables:
    """p(. | context) and q(. | context), float64, reproducible from (kind, seed)."""

    def __init__(self, kind: str, seed: int = 0, vocabulary: int = V):
        self.kind, self.seed, self.vocabulary = kind, seed, vocabulary
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, context: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if context not in self._rows:
            self._rows[context] = self._make(context)
        return self._rows[context]

    def _make(self, context: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(hash((self.seed, *context)) % 2**31)
        p, q = torch.rand(2, self.vocabulary, generator=generator, dtype=torch.float64) + 0.02
        if self.kind == "sparse":  # top-p: zeros on either side
            p[int(torch.randint(self.vocabulary, (1,), generator=generator))] = 0
            q[int(torch.randint(self.vocabulary, (1,), generator=generator))] = 0
        elif self.kind == "equal":
            q = p.clone()
        elif self.kind == "close":
            q = p * (
                1 + 1e-9 * torch.rand(self.vocabulary, generator=generator, dtype=torch.float64)
            )
        elif self.kind == "disjoint":
            split = int(torch.randint(1, self.vocabulary, (1,), generator=generator))
            p[:split], q[split:] = 0, 0
        elif self.kind == "one-hot p":
            p = torch.eye(self.vocabulary, dtype=torch.float64)[int(p.argmax())]
        elif self.kind == "one-hot q":
            q = torch.eye(self.vocabulary, dtype=torch.float64)[int(q.argmax())]
        return p / p.sum(), q / q.sum()


class TableDrafter(Drafter):
    """A drafter that reads q from tables; the context is the tree's path."""

    def __init__(self, tables: Tables):
        self.tables, self.vocab_size = tables, tables.vocabulary
        self.root = type("Point", (), {"hidden": None, "q": tables(())[1]})

    def expand(self, tree: DraftTree, nodes: list[int]) -> None:
        for node in nodes:
            tree.q[node] = self.tables(context_of(tree, node))[1]

    def rerank(self, nodes: list[int]) -> None:
        """Contexts are known by their tokens."""


def context_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Tokens from below the root down to `node`."""
    tokens = []
    while node:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(tokens))


def tau(tree: DraftTree, verdict: Verdict) -> int:
    """How many drafted tokens are accepted."""
    return tree.depth[verdict.end]


def one_step(tables: Tables, policy, verify, rng) -> tuple[DraftTree, Verdict]:
    """Draft with the policy and verify, both through the code that the decode loop calls."""
    tree = scored(tables, policy, rng)
    return tree, verify(tree, rng)


def scored(tables: Tables, policy, rng, room: int = 1 << 20) -> DraftTree:
    """A tree of the policy with the target's rows of the tables."""
    state = DecodingState(0, 1, room, RAW, None, None)
    tree = policy.draft(state, TableDrafter(tables), rng)
    tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
    return tree


def emitted(tree: DraftTree, rule, rng) -> tuple[int, ...]:
    """The tokens that a step commits: those of the accepted nodes, then the target's own."""
    return tuple(tree.commit(*rule(tree, rng)).tokens)
