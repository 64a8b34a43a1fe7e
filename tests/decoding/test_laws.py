"""Every rule's output law is the target's on every kind of tree that it takes.

By exact enumeration of the code that the decode loop calls, in float64 and float32, with rows that
have zeros, ones, ties and hardly any difference between p and q.
"""

from functools import partial

import pytest
import torch

from nde_talf import (
    VERIFIERS,
    Action,
    Beam,
    Delayed,
    DraftTree,
    DynaTree,
    DySpec,
    DySpecThreshold,
    Rng,
    Salf,
    Shaped,
)
from nde_talf.decoding.policies.dynatree import DynaTreeConfig
from nde_talf.decoding.registry import EVERY
from nde_talf.decoding.rules import verification_table
from nde_talf.decoding.rules.residual import Residual, accept
from nde_talf.decoding.testing import exact_law, expectation
from nde_talf.decoding.verifier import check_compatible
from tests.decoding.laws import PEAKED, PeakedTables, distance, step_error
from tests.decoding.tables import KINDS, Tables, context_of, emitted, one_step, scored, tau
from tests.refusal import refusal

FLAT, UNEVEN, FORKED = ((), (), ()), (((),), ()), (((), ()), ())
# What is drafted -> (how, tokens of the law to look at). The rest of longer ones is p's own.
TREES = {
    "none": (lambda: Delayed(Action(1, 0, 0)), 1),
    "path": (lambda: Delayed(Action(1, 0, 2)), 3),
    "trunk alone": (lambda: Delayed(Action(4, 2, 0)), 3),
    "two": (lambda: Delayed(Action(2, 0, 1)), 2),
    "three": (lambda: Delayed(Action(3, 0, 1)), 2),
    "trunk": (lambda: Delayed(Action(2, 1, 1)), 3),
    "deep": (lambda: Delayed(Action(2, 0, 2)), 3),
    "deep trunk": (lambda: Delayed(Action(2, 1, 2)), 4),
    "three deep": (lambda: Delayed(Action(3, 0, 2)), 3),
    "iid": (lambda: Shaped(UNEVEN, "iid"), 3),
    "distinct": (lambda: Shaped(FLAT[:2], "without_replacement"), 2),
    "three distinct": (lambda: Shaped(FLAT, "without_replacement"), 2),
    "deep distinct": (lambda: Shaped(FORKED, "without_replacement"), 3),
    "dyspec": (lambda: DySpec(nodes=3), 4),
    "dyspec, context ends": (lambda: DySpec(nodes=3), 2),
    "dyspec, threshold": (lambda: DySpecThreshold(threshold=0.1, nodes=3), 3),
    "dyspec, no threshold": (lambda: DySpecThreshold(threshold=0.0, nodes=3), 2),
    "top": (lambda: Shaped(UNEVEN, "top_k"), 3),
    "beam": (lambda: Beam(k=2, depth=2, nodes=3), 3),
    "deep beam": (lambda: Beam(k=3, depth=3, nodes=5), 4),
    "salf": (lambda: Salf(nodes=3, batch=2, threshold=0.3), 3),
    "dynatree": (lambda: DynaTree(DynaTreeConfig(nodes=4, depth=2, max_depth=3)), 3),
}
LARGE = ("trunk", "deep", "deep trunk", "three deep", "iid", "deep distinct", "deep beam")
BOTTOM_UP = ("bv", "tv", "traversal", "gbv", "gbv_exact", "traversal_without_replacement")
DISTINCT = ("without_replacement", "traversal_without_replacement")
CASES = [
    (tree, name)
    for tree, (make, _) in TREES.items()
    for name, rule in VERIFIERS.items()
    if name != "greedy" and make().trees in rule.trees
]
FEW = ("random", "sparse")  # kinds for large trees
SLOW, NIGHT = pytest.mark.slow, pytest.mark.law


def error(tree, name, tables):
    make, length = TREES[tree]
    room = 1 if tree.endswith("context ends") else 100
    return step_error(tables, make(), VERIFIERS[name], length, room)


@pytest.mark.parametrize(
    "tree,name,kind",
    [
        pytest.param(*case, kind, marks=SLOW if case[0] in LARGE or kind != "random" else ())
        for case in CASES
        for kind in (FEW if case[0] in LARGE else KINDS)
    ],
)
def test_output_law_is_the_targets(tree, name, kind):
    tables = Tables(kind, seed=3, vocabulary=2 if tree in LARGE else 3)
    # "close" is p = q up to 1e-9, so that the residual is rounding noise.
    assert error(tree, name, tables) < (1e-7 if kind == "close" else 1e-9)


TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-12}
SOME = ("gap 16", "gap 25", "two steps", "ties", "one-hot draft", "cold draft", "top-p of both")


def kinds_of(tree):
    """Peaked rows that `make test` looks at; all others are for the night."""
    return tuple(PEAKED) if tree in ("distinct", "three distinct", "dyspec") else SOME


@pytest.mark.parametrize(
    "tree,name,night",
    [
        pytest.param(*case, night, marks=pytest.mark.law if night else SLOW)
        for case in CASES
        for night in (False, True)
    ],
)
def test_laws_of_peaked_rows(tree, name, night):
    for kind in PEAKED if night else kinds_of(tree):
        for dtype in TOLERANCE if night or kind == "two steps" else [torch.float32]:
            small = 3 if tree in LARGE else 4
            tables = PeakedTables(kind, dtype, small if night else 2 if tree in LARGE else 3)
            assert error(tree, name, tables) < TOLERANCE[dtype], (kind, dtype)


TABLED = ("naive", "naivetree", "specinfer", "nss", "bv", "traversal")


def all_tables(night):
    """Rows of every kind, or of some, with the error that their law may have."""
    for kind in KINDS if night else FEW[1:]:
        yield Tables(kind, seed=3, vocabulary=2), 1e-7 if kind == "close" else 1e-9
    for dtype, bound in TOLERANCE.items():
        if night or dtype == torch.float32:
            for kind in PEAKED if night else ("gap 16", "two steps"):
                yield PeakedTables(kind, dtype, 2), bound


@pytest.mark.parametrize("tree", ["path", "trunk", "deep", "iid", "beam"])
@pytest.mark.parametrize(
    "night", [pytest.param(False, marks=SLOW), pytest.param(True, marks=NIGHT)]
)
def test_laws_through_one_table_are_todays_and_the_targets(tree, night, monkeypatch):
    """On a GPU all numbers of a walk come in one transfer (`verification_table`)."""
    policy = TREES[tree][0]()

    def step(rng, name, tables):
        drafted, verdict = one_step(tables, policy, VERIFIERS[name], rng)
        return *drafted.tokens, *verdict

    for name in (name for name in TABLED if (tree, name) in CASES):
        for tables, bound in all_tables(night):
            todays = exact_law(partial(step, name=name, tables=tables))
            with monkeypatch.context() as patch:
                patch.setattr(verification_table, "asynchronous", lambda device: True)
                assert distance(exact_law(partial(step, name=name, tables=tables)), todays) < bound
                assert error(tree, name, tables) < bound


class Marked(Shaped):
    """Three draws without replacement, with other masses than they were drawn from."""

    def __init__(self, masses):
        super().__init__(FLAT[:2], "without_replacement")
        self.masses = masses

    def draft(self, state, drafter, rng):
        tree = super().draft(state, drafter, rng)
        tree.left[0] = self.masses(tree)
        return tree


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("kind", ["gap 16", "two steps"])
def test_what_a_child_was_drawn_from_need_not_be_recorded(name, kind):
    policy = Marked(lambda tree: [None] * len(tree.children[0]))
    assert step_error(PeakedTables(kind), policy, VERIFIERS[name], 2) < 2e-7


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("left", [0.0, None])
def test_a_child_that_could_not_be_drawn_is_never_accepted(name, left):
    """Nothing is left behind a first draw of probability 1; a second child changes nothing."""
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([1.0, 0.0, 0.0])
    assert accept(float(p[1]), float(q[1]), Residual(), left=0.0) == 0
    tree = DraftTree.rooted(0, q)
    tree.add(0, 0)
    tree.add(0, 1, left)
    tree.p = [p] * 3
    law = exact_law(lambda rng: emitted(tree, VERIFIERS[name], rng)[0])
    assert [law[token] for token in range(3)] == pytest.approx(p.tolist(), abs=1e-7)


@pytest.mark.parametrize("trees", sorted(EVERY))
def test_rules_refuse_trees_on_which_they_are_biased(trees):
    refused = {name for name, rule in VERIFIERS.items() if trees not in rule.trees}
    assert {"naive", "bv", "tv"} <= refused or trees in ("none", "path")
    for name in refused:
        with refusal(f"verifier={name} .*'{trees}'"):
            check_compatible(trees, VERIFIERS[name])


def greedy_text(tables, length):
    tokens = []
    for _ in range(length):
        tokens.append(int(tables(tuple(tokens))[0].argmax()))
    return tokens


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name not in ("naive", "tv", "bv")])
def test_at_temperature_0_the_longest_greedy_prefix_is_accepted(name):
    tables = Tables("one-hot p", seed=3)
    tree = DraftTree.rooted(0, torch.full((3,), 1 / 3, dtype=torch.float64))
    best = greedy_text(tables, 2)
    wrong = [[(best[0] + 1) % 3, 0], [best[0], (best[1] + 1) % 3]]
    # Repeats under the root, but for rules of distinct draws.
    for path in (wrong[0], best, *([] if name in DISTINCT else wrong[1:])):
        node = 0
        for token in path:
            node = tree.add(node, token)
    tree.q = [tree.q[0]] * len(tree)
    tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
    outcomes = exact_law(lambda rng: emitted(tree, VERIFIERS[name], rng))
    assert [list(text) for text in outcomes] == [greedy_text(tables, 3)]


def test_greedy_matching_is_refused_above_temperature_0():
    tree = scored(Tables("random", seed=7), Delayed(Action(2, 0, 1)), Rng.seeded(0))
    with refusal("temperature 0"):
        VERIFIERS["greedy"](tree, Rng.seeded(0))


@pytest.mark.parametrize("kind", KINDS)
def test_block_efficiencies_keep_their_order(kind):
    tables = Tables(kind, seed=8, vocabulary=2)

    def efficiency(name, policy):
        return expectation(lambda rng: 1 + tau(*one_step(tables, policy, VERIFIERS[name], rng)))

    for tree, better, worse in (
        (lambda: Delayed(Action(1, 0, 3)), "bv", "naive"),
        (lambda: Delayed(Action(2, 1, 1)), "traversal", "specinfer"),
        (lambda: Shaped(FORKED, "without_replacement"), DISTINCT[1], DISTINCT[0]),
    ):
        assert efficiency(better, tree()) >= efficiency(worse, tree()) - 1e-9
    flat = Delayed(Action(3, 0, 1))
    assert efficiency("traversal", flat) == pytest.approx(efficiency("specinfer", flat), abs=1e-9)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "close"])
def test_on_a_single_path_methods_coincide(kind):
    tables, path = Tables(kind, seed=6), Delayed(Action(1, 0, 2))

    def law(name):
        def step(rng):
            tree, verdict = one_step(tables, path, VERIFIERS[name], rng)
            return tau(tree, verdict), *tree.tokens, verdict.token

        return exact_law(step)

    others = [name for name in VERIFIERS if name not in (*BOTTOM_UP, "greedy", "nss")]
    for first, *family in (others, BOTTOM_UP):
        expected = law(first)
        for name in family:
            assert distance(expected, law(name)) < 1e-9, name
