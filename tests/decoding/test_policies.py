"""Tree policies: the theorems and programmes that they are known for, and what they learn."""

from itertools import product

import pytest

from nde_talf import Beam, DecodingState, DynaTree, Rng, sequoia_shape
from nde_talf.decoding.policies.dynatree import DynaTreeConfig, History
from nde_talf.decoding.sampling.sampling_setting import RAW
from tests.decoding.tables import TableDrafter, Tables

V = 6


def drafted(policy, seed, room=100):
    """A tree of `policy`, the draft's tables and the state that the policy saw."""
    tables, state = Tables("random", seed, V), DecodingState(0, 1, room, RAW, None, None)
    return policy.draft(state, TableDrafter(tables), Rng.seeded(seed)), tables, state


def test_paths_less_likely_than_a_float_can_say_are_drafted():
    """About 0.4 ** 1000."""
    tree, *_ = drafted(Beam(k=1, depth=1000, nodes=1000), 0, 2000)
    assert max(tree.depth) == 1000


def test_dynatree_adapts_within_bounds_and_forgets_between_sequences():
    config = DynaTreeConfig(depth=3, max_depth=5, window=2)
    history = History(config)
    for accepted, depth in ((1.0, 4), (0.0, 1)):
        for _ in range(20):
            history.learn(accepted)
        assert history.depth == depth and 0 < history.confident_low < history.confident_high <= 1
    assert history.confident_high - history.confident_low == pytest.approx(0.5)
    fresh = History(config)
    assert (fresh.depth, fresh.confident_low, fresh.confident_high) == (3, 0.4, 0.9)


@pytest.mark.parametrize("tau,move", [(3, -1), (40, 1)])
def test_dynatree_learns_from_the_fraction_of_the_last_draft_that_was_committed(tau, move):
    """With a window of one, a step is aggressive or conservative by that one fraction."""
    policy = DynaTree(DynaTreeConfig(window=1, low=0.29, high=0.31, stop=0.001, prune=0.0))
    tree, tables, state = drafted(policy, 0)
    history = state.memory[policy]
    assert history.drafted == len(tree) - 1 > max(tree.depth) > 3 and history.depth == 5
    state.tau = tau
    policy.draft(state, TableDrafter(tables), Rng.seeded(0))
    assert history.depth == 5 + move
    assert (history.confident_low, history.confident_high) == pytest.approx(
        (0.4 - 0.05 * move, 0.9 - 0.05 * move)
    )


def every_shape(nodes, depth, width):
    """All ordered trees of up to `nodes` drafted tokens."""
    if not nodes or not depth:
        return [()]
    shapes = [()]
    for count in range(1, width + 1):
        for parts in product(every_shape(nodes - 1, depth - 1, width), repeat=count):
            if sum(1 + size(part) for part in parts) <= nodes:
                shapes.append(parts)
    return shapes


def size(shape):
    return sum(1 + size(child) for child in shape)


def accepted(shape, rates):
    return sum(
        rate * (1 + accepted(child, rates)) for rate, child in zip(rates, shape, strict=False)
    )


@pytest.mark.parametrize("nodes,depth", [(1, 3), (4, 2), (5, 3)])
def test_sequoias_shape_is_the_best_of_all(nodes, depth):
    for rates in ([0.7, 0.2], [0.5, 0.3], [0.9, 0.05]):
        shape = sequoia_shape(rates, nodes, depth)
        assert size(shape) <= nodes
        best = max(accepted(other, rates) for other in every_shape(nodes, depth, 2))
        assert accepted(shape, rates) == pytest.approx(best)
