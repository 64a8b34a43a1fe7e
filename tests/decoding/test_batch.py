"""`verify_batch`: trees of different shapes padded to one number of nodes; every one's verdict has
the law that it has alone.
"""

import pytest
import torch

from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.verify_batch import rows_of, verify_batch
from nde_talf.decoding.sampling import RAW, Rng, SamplingSetting, warp
from nde_talf.decoding.testing import exact_law
from nde_talf.decoding.tree import DraftTree
from nde_talf.decoding.verifier import verifier
from tests.decoding.laws import distance
from tests.decoding.tables import KINDS, Tables

# Drafted paths of tokens; what two have in common is one node, drawn as often as there are paths
# through it.
SHAPES = {
    "bare": [],
    "path": [(1, 0)],
    "repeats": [(1, 2), (1, 0), (2, 2)],
    "uneven": [(0,), (2, 1), (0, 1)],
    "distinct": [(2,), (0, 1)],
}
FITTING = {
    "path": ("bare", "path"),
    "delayed": ("bare", "path", "repeats"),
    "iid": ("bare", "path", "repeats", "uneven"),
    "without_replacement": ("bare", "path", "distinct"),
}
V = 3


def drafted(paths, tables: Tables) -> tuple[list[int], list[int], DraftTree]:
    """Tokens and parents with every draw a node of its own, and the same tree on the host."""
    tokens, parents, tree = [0], [-1], DraftTree.rooted(0, tables(())[1])
    for path in paths:
        node, draw = 0, 0
        for at, token in enumerate(path):
            tokens.append(token)
            parents.append(draw)
            before = {tree.tokens[child] for child in tree.children[node]}
            left = sum(x for t, x in enumerate(tree.q[node].tolist()) if t not in before)
            draw, node = len(tokens) - 1, tree.add(node, token, left)
            tree.q[node] = tables(path[: at + 1])[1]
    tree.p = [tables(context(tree, node))[0] for node in range(len(tree))]
    return tokens, parents, tree


def context(tree: DraftTree, node: int) -> tuple[int, ...]:
    return (*context(tree, tree.parents[node]), tree.tokens[node]) if node else ()


def padded(trees, tables: Tables):
    """tokens, parents [B, N], p, q [B, N, V] and left [B, N]; the rows of padding are wrong on
    purpose.
    """
    count = max(len(tokens) for tokens, _, _ in trees) + 1
    p, q = torch.full((2, len(trees), count, V), float("nan"), dtype=torch.float64)
    left = torch.ones(len(trees), count, dtype=torch.float64)
    for b, (tokens, parents, tree) in enumerate(trees):
        for node in range(len(tokens)):
            path, at = (), node
            while at:
                path, at = (tokens[at], *path), parents[at]
            p[b, node], q[b, node] = tables(path)
        if len(tree) == len(tokens):  # no draw again
            for node, children in enumerate(tree.children):
                left[b, children] = torch.tensor(tree.left[node], dtype=torch.float64)
    tokens = torch.tensor([[*line, *[7] * (count - len(line))] for line, _, _ in trees])
    parents = torch.tensor([[*line, *[-2] * (count - len(line))] for _, line, _ in trees])
    return tokens, parents, p, q, left


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [name for name, rule in VERIFIERS.items() if rule.on_device and name != "greedy"]
)
def test_in_a_batch_every_tree_has_the_law_that_it_has_alone(name, kind):
    if kind in ("disjoint", "sparse", "one-hot q"):
        pytest.skip("the shapes' tokens need mass in q")
    if (name, kind) == ("spectr", "close"):
        pytest.skip("many rho are as good, and the host may find another one than the device")
    tables = Tables(kind, seed=4)
    rule = verifier(name)
    kind_of_tree = next(trees for trees in reversed(FITTING) if trees in rule.trees)
    trees = [drafted(SHAPES[shape], tables) for shape in FITTING[kind_of_tree]]
    tokens, parents, p, q, left = padded(trees, tables)
    left = left if kind_of_tree == "without_replacement" else None
    for b, (_, _, tree) in enumerate(trees):
        alone = exact_law(lambda rng, tree=tree: emitted(tree, *rule(tree, rng)))

        def one_of_them(rng, b=b):
            batch = verify_batch(rule, tokens, parents, p, q, OneRow(rng, b), left)
            return tuple(batch.tokens[b, : batch.length[b]].tolist())

        assert distance(exact_law(one_of_them), alone) < (1e-7 if kind == "close" else 1e-9)


class OneRow:
    """Draws of row b come from `rng`, and all others are the likeliest: what they are does not
    matter to b.
    """

    def __init__(self, rng, b: int):
        self.rng, self.b = rng, b

    def bernoulli(self, probability):
        decided = probability > 0.5
        decided[self.b] = self.rng.bernoulli(float(probability[self.b]))
        return decided

    def categorical(self, weights):
        drawn = weights.argmax(-1)
        drawn[self.b] = self.rng.categorical(weights[self.b])
        return drawn


def emitted(tree: DraftTree, end: int, token: int) -> tuple[int, ...]:
    return (*context(tree, end), token)


def test_rows_are_warped_when_they_are_asked_for():
    """A top-down rule asks for depth + 1 rows of each tree, whatever the number of nodes."""
    setting, asked = SamplingSetting(0.7, 0.9), []
    logits = torch.randn(2, 2, 9, 50, generator=torch.Generator().manual_seed(0))
    tokens, parents = torch.arange(18).view(2, 9), torch.tensor([[-1, 0, 0, 0, 0, 1, 2, 3, 4]] * 2)

    def rows(at):
        asked.append(at)
        return logits[0][torch.arange(2), at]

    trees, rng = (verifier("spectr"), tokens, parents), Rng.seeded
    lazily = verify_batch(*trees, rows_of(rows, setting), rows_of(logits[1], RAW), rng(0))
    p, q = warp(logits[0], setting), warp(logits[1], RAW)
    at_once = verify_batch(*trees, p, q, rng(0), sizes=(2, 4))
    assert len(asked) == 3
    assert all(torch.equal(one, other) for one, other in zip(lazily, at_once, strict=True))


@pytest.mark.parametrize(
    "tokens,parents,message",
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "expected"),
        (torch.zeros(1, 3).long(), torch.tensor([[-1, 2, 0]]), "node 1 of tree 0"),
        (torch.zeros(1, 3).long(), torch.tensor([[0, 0, 0]]), "node 0 of tree 0"),
    ],
)
def test_malformed_batches_are_named(tokens, parents, message):
    rows = torch.full((1, 3, V), 1 / V)
    with pytest.raises(ValueError, match=message):
        verify_batch(verifier("nss"), tokens, parents, rows, rows, Rng.seeded(0))


def test_a_row_without_mass_is_told_by_its_token():
    rows = torch.full((2, 2, V), 1 / V)
    broken = rows.clone()
    broken[1] = float("nan")
    tokens, parents = torch.zeros(2, 2).long(), torch.tensor([[-1, 0]] * 2)
    for name in ("specinfer", "traversal", "nss", "gbv"):
        batch = verify_batch(verifier(name), tokens, parents, broken, rows, Rng.seeded(0))
        assert batch.token[0] >= 0 and batch.token[1] == -1
