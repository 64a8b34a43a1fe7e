"""Every allowed pair of trees and rule has the target's law on peaked rows, in float32 as in
float64, on host and device.
"""

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig
from nde_talf.decoding.policies.dyspec import DySpec, DySpecThreshold
from nde_talf.decoding.policies.fixed import Shaped
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.residual import Residual, accept
from nde_talf.decoding.testing import exact_law
from nde_talf.decoding.tree import DraftTree
from tests.decoding.peaked import KINDS, PeakedTables, step_error

FLAT, UNEVEN, DEEP = ((), (), ()), (((),), ()), (((), ()), ())
# What is drafted -> (how, tokens of the law to look at). The rest of longer ones is p's own.
TREES = {
    "path": (lambda: Delayed(Action(1, 0, 2)), 3),
    "delayed": (lambda: Delayed(Action(2, 0, 1)), 2),
    "trunk": (lambda: Delayed(Action(2, 1, 1)), 3),
    "three": (lambda: Delayed(Action(3, 0, 1)), 2),
    "iid": (lambda: Shaped(UNEVEN, "iid"), 3),
    "two": (lambda: Shaped(FLAT[:2], "without_replacement"), 2),
    "flat": (lambda: Shaped(FLAT, "without_replacement"), 2),
    "deep": (lambda: Shaped(DEEP, "without_replacement"), 3),
    "dyspec": (lambda: DySpec(nodes=3), 4),
    "dyspec, context ends": (lambda: DySpec(nodes=3), 2),
    "threshold": (lambda: DySpecThreshold(threshold=0.1, nodes=3), 3),
    "no threshold": (lambda: DySpecThreshold(threshold=0.0, nodes=3), 2),
    "top": (lambda: Shaped(UNEVEN, "top_k"), 3),
    "beam": (lambda: Beam(k=2, depth=2, nodes=3), 3),
    "salf": (lambda: Salf(nodes=3, batch=2, threshold=0.3), 3),
    "salf, filled": (lambda: Salf(nodes=3, batch=1, threshold=0.3, fill=True), 3),
    "dynatree": (lambda: DynaTree(DynaTreeConfig(nodes=4, depth=2, max_depth=3)), 3),
    "dynatree, wide": (
        lambda: DynaTree(DynaTreeConfig(nodes=4, branch_at_root=True, drop_pruned=True)),
        3,
    ),
}
ROOM = {"dyspec, context ends": 1}  # tokens of context that are left
PAIRS = [
    (tree, name)
    for tree, (make, _) in TREES.items()
    for name, rule in VERIFIERS.items()
    if make().trees in rule.trees and name != "greedy"
]
FIXED = ("path", "delayed", "trunk", "three", "iid", "two", "flat", "deep", "top")
ON_DEVICE = [pair for pair in PAIRS if pair[0] in FIXED and VERIFIERS[pair[1]].on_device]
TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-12}
DOUBLE = ("two steps", "top-p of both")  # of some kinds, those tried in float64 too
SOME = ("gap 16", "gap 25", "two steps", "ties", "one-hot draft", "cold draft", "top-p of both")
LONG = pytest.mark.law


def check(pairs, kinds, on_device: bool, vocabulary: int = 4) -> None:
    for tree, name in pairs:
        make, length = TREES[tree]
        for kind in kinds:
            for dtype, tolerance in TOLERANCE.items():
                if dtype == torch.float64 and kinds is not KINDS and kind not in DOUBLE:
                    continue
                error = step_error(
                    PeakedTables(kind, dtype, vocabulary),
                    make(),
                    VERIFIERS[name],
                    on_device,
                    length,
                    ROOM.get(tree, 100),
                )
                assert error < tolerance, (tree, name, kind, dtype, error)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
def test_laws_on_the_host(tree):
    large = tree in ("deep", "iid", "trunk", "three")
    kinds = KINDS if tree in ("two", "flat", "dyspec") else SOME
    check(
        [pair for pair in PAIRS if pair[0] == tree],
        kinds,
        on_device=False,
        vocabulary=3 if large else 4,
    )


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["path", "delayed", "two", "flat"])
def test_laws_on_the_device(tree):
    pairs = [pair for pair in ON_DEVICE if pair[0] == tree]
    check(pairs, SOME, on_device=True, vocabulary=3 if tree == "path" else 4)


@LONG
@pytest.mark.parametrize("tree", TREES)
def test_all_laws_on_the_host(tree):
    check([pair for pair in PAIRS if pair[0] == tree], KINDS, on_device=False)


@LONG
@pytest.mark.parametrize("tree,name", ON_DEVICE)
def test_all_laws_on_the_device(tree, name):
    check([(tree, name)], KINDS, on_device=True, vocabulary=3)


@pytest.mark.parametrize("name", ["without_replacement", "traversal_without_replacement"])
@pytest.mark.parametrize("kind", ["gap 16", "gap 18", "two steps"])
def test_what_a_child_was_drawn_from_need_not_be_recorded(name, kind):
    """A tree that somebody else has made: the rule sums up what was left."""

    class Bare(Shaped):
        def draft(self, state, drafter, rng):
            tree = super().draft(state, drafter, rng)
            tree.left = [[None] * len(children) for children in tree.children]
            return tree

    assert (
        step_error(PeakedTables(kind), Bare(FLAT), VERIFIERS[name], on_device=False, length=2)
        < 2e-7
    )


@pytest.mark.parametrize("name", ["without_replacement", "traversal_without_replacement"])
def test_a_child_that_could_not_be_drawn_is_never_accepted(name):
    """Nothing is left behind a first draw of probability 1; a second child that comes all the same
    changes nothing.
    """
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([1.0, 0.0, 0.0])
    assert accept(float(p[1]), float(q[1]), Residual(), left=0.0) == 0
    for left in (0.0, None):
        tree = DraftTree.rooted(0, q)
        tree.add(0, 0)
        tree.add(0, 1, left)
        tree.p = [p] * 3

        def first(rng, tree=tree):
            end, token = VERIFIERS[name](tree, rng)
            return tree.tokens[tree.path(end)[0]] if end else token

        law = exact_law(first)
        assert [law[token] for token in range(3)] == pytest.approx(p.tolist(), abs=1e-7)


def test_a_biased_rule_is_caught():
    """Without replacement, with 1 - q(x) for what is left: what these tests are for."""

    class Forgetful(Shaped):
        def draft(self, state, drafter, rng):
            tree = super().draft(state, drafter, rng)
            first, *others = tree.left[0]
            tree.left[0] = [first, *[1 - float(tree.q[0][tree.tokens[1]])] * len(others)]
            return tree

    rule = VERIFIERS["without_replacement"]
    assert (
        step_error(PeakedTables("gap 16"), Forgetful(((), ())), rule, on_device=False, length=2)
        > 1e-3
    )
