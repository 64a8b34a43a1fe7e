"""Trees of a fixed shape that lie on the device: the target's exact law, greedy decoding, and one wait."""

import pytest
import torch

from decoding.drafter import LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.policies.base import DecodingState
from decoding.policies.delayed import Autoregressive
from decoding.policies.shaped import Shaped, fixed_shape
from decoding.sampling import RAW, Rng, SamplingSetting
from decoding.static import StaticShapes
from decoding.testing import exact_law
from decoding.verification import VERIFIERS
from tests.decoding.laws import distance, emitted_law, target_law
from tests.decoding.on_device import ReadingDrafter
from tests.decoding.pairs import tiny_pair
from tests.decoding.tables import TableDrafter, Tables, context_of

FLAT, UNEVEN, DEEP = ((), ()), (((),), ()), (((), ()), ())
BOTH = ("without_replacement", "traversal_without_replacement")
# Drafts whose mass ends before the draws do: one-hot, sparse and disjoint.
CASES = [
    *((name, "distinct", FLAT, kind, 3) for name in BOTH for kind in ("random", "sparse", "disjoint", "one-hot q")),
    *((name, "distinct", DEEP, kind, 2) for name in BOTH for kind in ("random", "equal", "one-hot q")),
    *((name, "iid", UNEVEN, kind, 2) for name in ("specinfer", "traversal", "nss") for kind in ("random", "sparse")),
    *(("nss", trees, UNEVEN, "sparse", 2) for trees in ("chosen", "distinct")),
    ("nss", "chosen", FLAT, "random", 3),
    *((name, "iid", UNEVEN, "random", 2) for name in ("naivetree", "spectr", "khisti")),
]


def tree_of(shape, trees: str, tables: Tables, rng):
    state = DecodingState(0, 1, 1 << 20, RAW, None, None, unread=True)
    tree = Shaped(shape, trees).draft(state, ReadingDrafter(tables), rng)
    tree.p = torch.stack([tables(tuple(map(int, context_of(tree, node))))[0] for node in range(len(tree))])
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("name,trees,shape,kind,vocabulary", CASES, ids=str)
def test_output_law_is_the_targets(name, trees, shape, kind, vocabulary):
    tables, length = Tables(kind, seed=3, vocabulary=vocabulary), 2 if shape == FLAT else 3

    def step(rng):
        tree = tree_of(shape, trees, tables, rng)
        read, _, verdict, _ = tree.read(*VERIFIERS[name].unread(tree, rng))
        return read, verdict

    assert distance(emitted_law(tables, step, length), target_law(tables, length)) < 1e-9


@pytest.mark.parametrize("name", BOTH)
def test_verdicts_have_the_law_of_the_rule_on_the_host(name):
    """Of the tree, the node accepted last and the token."""
    tables = Tables("random", seed=5)

    def host(rng):
        tree = Shaped(FLAT, "distinct").draft(DecodingState(0, 1, 1 << 20, RAW, None, None), TableDrafter(tables), rng)
        tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
        return tuple(tree.tokens), tree.children[0][-1], *map(str, VERIFIERS[name](tree, rng))

    def on_device(rng):
        tree = tree_of(FLAT, "distinct", tables, rng)
        read, _, verdict, _ = tree.read(*VERIFIERS[name].unread(tree, rng))
        return tuple(read.tokens), read.children[0][-1], *map(str, verdict)

    assert distance(exact_law(host), exact_law(on_device)) < 1e-9


def test_where_no_mass_is_left_a_draw_comes_again():
    tree = tree_of(FLAT, "distinct", Tables("one-hot q", seed=3), Rng.seeded(0))
    assert int(tree.tokens[1]) == int(tree.tokens[2]) and tree.levels[1].first.tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("trees,name", [("iid", "traversal"), ("distinct", "without_replacement"), ("chosen", "greedy")])
@pytest.mark.parametrize("static", [False, True])
def test_greedy_decoding_is_autoregressive_decoding(trees, name, static):
    target, draft = tiny_pair(64, hidden=32, layers=2)
    shapes, greedy, warm = StaticShapes(60, rows=32) if static else None, SamplingSetting(0.0), SamplingSetting(0.7)
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["nss"])
    policy, drafter = Shaped(fixed_shape(3, 2, 10), trees), LMDrafter(draft, shapes)
    fast = SpeculativeDecoder(target, drafter, policy, VERIFIERS[name], warm, static=shapes, unread=True)
    found = fast.generate([1, 2, 3], 1000 if static else 40, greedy, Rng.seeded(0))
    assert found.tokens == plain.generate([1, 2, 3], len(found.tokens), greedy, Rng.seeded(0)).tokens
    assert found.block_efficiency > 1.1
