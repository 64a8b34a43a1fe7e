"""Trees that are not delayed ones: children drawn without replacement, and children chosen rather
than drawn.
"""

import heapq
from collections import Counter

import pytest
import torch
from scipy import stats

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.testing import exact_law, expectation
from nde_talf.decoding.tree import DraftTree
from nde_talf.decoding.verifier import check_compatible
from tests.decoding.laws import distance, emitted_law, target_law
from tests.decoding.tables import KINDS, Tables, context_of

DISTINCT = [
    name
    for name, rule in VERIFIERS.items()
    if "without_replacement" in rule.trees and name not in ("greedy", "naive", "bv")
]


def grow_by_value(tables: Tables, budget: int, depth: int, rng) -> DraftTree:
    """DySpec's heap policy: draw below the slot of highest value; a slot's next child excludes the
    tokens drawn before.
    """
    tree = DraftTree.rooted(0, tables(())[1])
    slots, count = [(-1.0, 0, 0, tables(())[1])], 0
    while slots and len(tree) <= budget:
        value, _, node, q = heapq.heappop(slots)
        token = rng.categorical(q)
        child = tree.add(node, token)
        mass = float(q[token] / q.sum())
        if tree.depth[child] < depth:
            tree.q[child] = tables(context_of(tree, child))[1]
            heapq.heappush(slots, (value * mass, (count := count + 1), child, tree.q[child]))
        rest = q.clone()
        rest[token] = 0
        if float(rest.sum()) > 0:
            heapq.heappush(slots, (value * (1 - mass), (count := count + 1), node, rest))
    tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
    return tree


def choose_best(tables: Tables, width: int, depth: int) -> DraftTree:
    """The `width` most likely children under q, all the way down."""
    tree, level = DraftTree.rooted(0, tables(())[1]), [0]
    for _ in range(depth):
        grown = []
        for node in level:
            tree.q[node] = tables(context_of(tree, node))[1]
            grown += [tree.add(node, int(token)) for token in tree.q[node].topk(width).indices]
        level = grown
    tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
    return tree


def law(tables: Tables, make, name: str, length: int):
    def step(rng):
        tree = make(rng)
        return tree, VERIFIERS[name](tree, rng)

    return emitted_law(tables, step, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget,depth", [(2, 1), (3, 2)])
@pytest.mark.parametrize("name", DISTINCT)
def test_children_without_replacement(name, budget, depth, kind):
    tables = Tables(kind, seed=7)
    found = law(tables, lambda rng: grow_by_value(tables, budget, depth, rng), name, depth + 1)
    assert distance(found, target_law(tables, depth + 1)) < (1e-7 if kind == "close" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["without_replacement", "traversal_without_replacement"])
def test_sampled_in_float32_they_follow_the_target(name):
    exact, trials, rng = Tables("random", seed=9), 5000, Rng.seeded(5)

    def single(context):
        return tuple(row.float() for row in exact(context))

    counts = Counter()
    for _ in range(trials):
        tree = grow_by_value(single, 3, 2, rng)
        verdict = VERIFIERS[name](tree, rng)
        tokens = (*context_of(tree, verdict.end), verdict.token)
        while len(tokens) < 3:
            tokens = (*tokens, rng.categorical(single(tokens)[0]))
        counts[tokens[:3]] += 1
    law = target_law(exact, 3)
    assert min(law.values()) * trials >= 5
    statistic = sum(
        (counts[tokens] - chance * trials) ** 2 / (chance * trials)
        for tokens, chance in law.items()
    )
    assert stats.chi2.sf(statistic, len(law) - 1) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_traversal_accepts_at_least_as_much(kind):
    tables = Tables(kind, seed=7)

    def efficiency(name: str) -> float:
        def accepted(rng):
            tree = grow_by_value(tables, 3, 2, rng)
            return 1 + tree.depth[VERIFIERS[name](tree, rng).end]

        return expectation(accepted)

    assert efficiency("traversal_without_replacement") >= efficiency("without_replacement") - 1e-9


def test_rules_for_independent_draws_are_biased_on_distinct_ones_and_refused():
    tables = Tables("random", seed=7)
    found = law(tables, lambda rng: grow_by_value(tables, 2, 1, rng), "specinfer", 2)
    assert distance(found, target_law(tables, 2)) > 1e-3
    for name in ("specinfer", "traversal", "spectr", "khisti", "gbv"):
        with pytest.raises(UserError, match="without_replacement"):
            check_compatible("without_replacement", VERIFIERS[name])


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_children_with_nss(kind):
    tables = Tables(kind, seed=7)
    found = law(tables, lambda rng: choose_best(tables, 2, 2), "nss", 3)
    assert distance(found, target_law(tables, 3)) < 1e-9


def test_greedy_follows_the_target_and_refuses_temperatures():
    tables = Tables("one-hot p", seed=7)
    tree = choose_best(tables, 2, 3)
    verdict = VERIFIERS["greedy"](tree, Rng.seeded(0))
    context = ()
    for node in tree.path(verdict.end):
        assert tree.tokens[node] == int(tables(context)[0].argmax())
        context = (*context, tree.tokens[node])
    assert verdict.token == int(tables(context)[0].argmax())
    warm = Tables("random", seed=7)
    with pytest.raises(UserError, match="temperature 0"):
        VERIFIERS["greedy"](choose_best(warm, 2, 1), Rng.seeded(0))


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name not in ("naive", "tv", "bv")])
def test_at_temperature_0_the_longest_greedy_prefix_is_accepted(name):
    tables = Tables("one-hot p", seed=3)
    tree = DraftTree.rooted(0, torch.full((3,), 1 / 3, dtype=torch.float64))
    best = [int(tables(())[0].argmax())]
    best.append(int(tables(tuple(best))[0].argmax()))
    for path in (
        [(best[0] + 1) % 3, 0],
        best,
        [best[0], (best[1] + 1) % 3],
    ):  # repeats under the root, but for distinct rules
        if name.endswith("without_replacement") and path is not best and path[0] == best[0]:
            continue
        node = 0
        for token in path:
            node = tree.add(node, token)
    for node in range(len(tree)):
        tree.q[node] = tree.q[0]
    if (
        name == "gbv"
    ):  # one block: the selected branch has the largest p / q, so it is the greedy one
        assert len(tree.children[0]) == 3
    tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
    outcomes = exact_law(lambda rng: tuple(tree.path(VERIFIERS[name](tree, rng).end)))
    (path,) = outcomes
    assert [tree.tokens[node] for node in path] == best
