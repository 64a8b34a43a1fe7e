"""Tabulated targets and drafts over tiny vocabularies: p and q are functions of the context."""

import torch
from torch import Tensor

from nde_talf import DecodingState, Drafter
from nde_talf.decoding.sampling.sampling_setting import RAW

V = 3
KINDS = ("random", "sparse", "equal", "disjoint", "one-hot p", "one-hot q", "close")


class Tables:
    """p(. | context) and q(. | context), float64, reproducible from (kind, seed)."""

    def __init__(self, kind, seed=0, vocabulary=V):
        self.kind, self.seed, self.vocabulary = kind, seed, vocabulary
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, context):
        if context not in self._rows:
            self._rows[context] = self._make(context)
        return self._rows[context]

    def _make(self, context):
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

    def __init__(self, tables):
        self.tables, self.vocab_size = tables, tables.vocabulary
        self.root = type("Point", (), {"hidden": None, "q": tables(())[1]})

    def expand(self, tree, nodes):
        for node in nodes:
            tree.q[node] = self.tables(context_of(tree, node))[1]

    def rerank(self, nodes):
        """Contexts are known by their tokens."""


def context_of(tree, node):
    """Tokens from below the root down to `node`."""
    tokens = []
    while node:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(tokens))


def tau(tree, verdict):
    """How many drafted tokens are accepted."""
    return tree.depth[verdict.end]


def one_step(tables, policy, verify, rng):
    """Draft with the policy and verify, both through the code that the decode loop calls."""
    tree = scored(tables, policy, rng)
    return tree, verify(tree, rng)


def scored(tables, policy, rng, room=1 << 20):
    """A tree of the policy with the target's rows of the tables."""
    state = DecodingState(0, 1, room, RAW, None, None)
    tree = policy.draft(state, TableDrafter(tables), rng)
    tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
    return tree


def emitted(tree, rule, rng):
    """The tokens that a step commits: those of the accepted nodes, then the target's own."""
    return tuple(tree.commit(*rule(tree, rng)).tokens)
