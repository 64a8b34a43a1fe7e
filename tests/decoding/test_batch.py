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
}
ONE_PATH, DELAYED = ("bare", "path"), ("bare", "path", "repeats")
V = 3


def drafted(paths, tables: Tables) -> tuple[list[int], list[int], DraftTree]:
    """Tokens and parents with every draw a node of its own, and the same tree on the host."""
    tokens, parents, tree = [0], [-1], DraftTree.rooted(0, tables(())[1])
    for path in paths:
        node, own = 0, 0
        for at, token in enumerate(path):
            tokens.append(token)
            parents.append(own)
            own, node = len(tokens) - 1, tree.add(node, token)
            tree.q[node] = tables(path[: at + 1])[1]
    tree.p = [tables(context(tree, node))[0] for node in range(len(tree))]
    return tokens, parents, tree


def context(tree: DraftTree, node: int) -> tuple[int, ...]:
    return (*context(tree, tree.parents[node]), tree.tokens[node]) if node else ()


def padded(trees, tables: Tables):
    """tokens, parents [B, N] and p, q [B, N, V]; the rows of padding are wrong on purpose."""
    count = max(len(tokens) for tokens, _, _ in trees) + 1
    p, q = torch.full((2, len(trees), count, V), float("nan"), dtype=torch.float64)
    for b, (tokens, parents, _) in enumerate(trees):
        for node in range(len(tokens)):
            path, at = (), node
            while at:
                path, at = (tokens[at], *path), parents[at]
            p[b, node], q[b, node] = tables(path)
    tokens = torch.tensor([[*own, *[7] * (count - len(own))] for own, _, _ in trees])
    parents = torch.tensor([[*own, *[-2] * (count - len(own))] for _, own, _ in trees])
    return tokens, parents, p, q


def shapes_for(name: str) -> tuple[str, ...]:
    kinds = VERIFIERS[name].trees
    return tuple(SHAPES) if "iid" in kinds else DELAYED if "delayed" in kinds else ONE_PATH


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
    trees = [drafted(SHAPES[shape], tables) for shape in shapes_for(name)]
    tokens, parents, p, q = padded(trees, tables)
    for b, (_, _, tree) in enumerate(trees):
        alone = exact_law(lambda rng, tree=tree: emitted(tree, *verifier(name)(tree, rng)))

        def one_of_them(rng, b=b):
            found = verify_batch(verifier(name), tokens, parents, p, q, OneRow(rng, b))
            return tuple(found.tokens[b, : found.length[b]].tolist())

        assert distance(exact_law(one_of_them), alone) < (1e-7 if kind == "close" else 1e-9)


class OneRow:
    """Draws of row b come from `rng`, and all others are the likeliest: what they are does not
    matter to b.
    """

    def __init__(self, rng, b: int):
        self.rng, self.b = rng, b

    def bernoulli(self, probability):
        found = probability > 0.5
        found[self.b] = self.rng.bernoulli(float(probability[self.b]))
        return found

    def categorical(self, weights):
        found = weights.argmax(-1)
        found[self.b] = self.rng.categorical(weights[self.b])
        return found


def emitted(tree: DraftTree, end: int, token: int) -> tuple[int, ...]:
    return (*context(tree, end), token)


@pytest.mark.parametrize("name", ["specinfer", "nss", "spectr"])
def test_rows_are_warped_when_they_are_asked_for(name):
    """A top-down rule asks for depth + 1 rows of each tree, whatever the number of nodes."""
    generator, setting, asked = torch.Generator().manual_seed(0), SamplingSetting(0.7, 0.9), []
    logits = torch.randn(2, 2, 9, 50, generator=generator)
    tokens, parents = (
        torch.randint(50, (2, 9), generator=generator),
        torch.tensor([[-1, 0, 0, 0, 0, 1, 2, 3, 4]] * 2),
    )

    def rows(at):
        asked.append(at)
        return logits[0][torch.arange(2), at]

    lazily = verify_batch(
        verifier(name),
        tokens,
        parents,
        rows_of(rows, setting),
        rows_of(logits[1], RAW),
        Rng.seeded(0),
    )
    p, q = warp(logits[0], setting), warp(logits[1], RAW)
    at_once = verify_batch(verifier(name), tokens, parents, p, q, Rng.seeded(0), sizes=(2, 4))
    assert len(asked) == 3
    assert all(torch.equal(one, other) for one, other in zip(lazily, at_once, strict=True))


def test_without_replacement_needs_the_masses_and_keeps_the_law():
    tables = Tables("random", seed=2)
    p, q = tables(())
    tree = DraftTree.rooted(0, q)
    for token, left in ((2, 1.0), (0, 1 - float(q[2]))):
        tree.add(0, token, left)
    tree.p = [p, *[tables((t,))[0] for t in (2, 0)]]
    rows = torch.stack([torch.stack([p, *tree.p[1:]]), torch.stack([q] * 3)])[:, None]
    left = torch.tensor([[1.0, 1.0, 1 - float(q[2])]], dtype=torch.float64)
    tokens, parents = torch.tensor([[0, 2, 0]]), torch.tensor([[-1, 0, 0]])
    for name in ("without_replacement", "traversal_without_replacement"):
        rule = verifier(name)
        alone = exact_law(lambda rng, rule=rule: emitted(tree, *rule(tree, rng)))
        batch = exact_law(
            lambda rng, rule=rule: tuple(
                t
                for t in (
                    verify_batch(rule, tokens, parents, *rows, rng, left=left).tokens[0].tolist()
                )
                if t >= 0
            )
        )
        assert distance(alone, batch) < 1e-9


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
        found = verify_batch(verifier(name), tokens, parents, broken, rows, Rng.seeded(0))
        assert found.token[0] >= 0 and found.token[1] == -1
