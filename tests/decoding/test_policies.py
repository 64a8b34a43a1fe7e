"""Every tree policy: lossless with the verifiers it is allowed with, and the law that it is known
for.
"""

from functools import cache
from itertools import pairwise, product

import pytest
import torch

from nde_talf import (
    Action,
    Beam,
    DecodingState,
    Delayed,
    DynaTree,
    DySpec,
    DySpecThreshold,
    LMDrafter,
    NgramConfig,
    Optimal,
    Rng,
    Salf,
    SamplingSetting,
    Shaped,
    UserError,
    fixed_shape,
    sequoia_shape,
)
from nde_talf.decoding.policies.dynatree import DynaTreeConfig, History
from nde_talf.decoding.policies.stopping import ConfidenceStop, FollowMean
from nde_talf.decoding.sampling import RAW, warp
from tests.decoding.pairs import tiny_pair

NEGLIGIBLE = 1e-4
BIG = tiny_pair(30, noise=0.3, seed=5)
SMALL = {
    "beam": lambda: Beam(k=2, depth=3, nodes=4),
    "optimal": lambda: Optimal(nodes=4, batch=2),
    "salf": lambda: Salf(nodes=4, batch=2, threshold=0.5),
    "dynatree": lambda: DynaTree(DynaTreeConfig(nodes=6, depth=2, max_depth=4, window=2)),
    "dyspec": lambda: DySpec(nodes=3),
    "dyspec-threshold": lambda: DySpecThreshold(threshold=0.3, nodes=3),
    "fixed": lambda: Shaped(fixed_shape(2, 2, 5), "top_k"),
    "fixed-iid": lambda: Shaped(fixed_shape(2, 2, 3), "iid"),
    "sequoia": lambda: Shaped(sequoia_shape([0.6, 0.3], 3, 2), "without_replacement"),
}


def drafted(policy, seed: int = 0, room: int = 100):
    """A tree of `policy` behind a random prompt of the larger vocabulary, and its drafter."""
    target, draft = BIG
    prompt = torch.randint(30, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    drafter, setting = LMDrafter(draft), SamplingSetting(0.7)
    with torch.inference_mode():
        features = target.hidden(torch.tensor([prompt]), torch.arange(6)[None], None, None)[0]
        drafter.start(prompt, 7, features, setting)
        p = warp(target.logits(features[-1]), setting)
        state = DecodingState(7, 7, room, setting, p, features[-1])
        return policy.draft(state, drafter, Rng.seeded(seed)), prompt


def path(tree, node: int) -> tuple[int, ...]:
    return (*path(tree, tree.parents[node]), tree.tokens[node]) if node else ()


@cache
@torch.inference_mode()
def most_probable(prompt: tuple[int, ...], count: int, depth: int) -> list[float]:
    """By brute force: the `count` largest path probabilities of the draft down to `depth`, all
    30^depth paths looked at.
    """
    nodes, level = [], {(): 1.0}
    for _ in range(depth):
        grown = {}
        for tokens, chance in level.items():
            logits = BIG[1].module(torch.tensor([[*prompt, 7, *tokens]])).logits[0, -1]
            for token, q in enumerate(warp(logits, SamplingSetting(0.7)).tolist()):
                grown[*tokens, token] = chance * q
        nodes += grown.values()
        level = {
            k: v for k, v in grown.items() if v > NEGLIGIBLE
        }  # what is below cannot be among the largest
    best = sorted(nodes, reverse=True)[:count]
    assert best[-1] > NEGLIGIBLE
    return best


def probabilities(tree, prompt: list[int]) -> list[float]:
    values = [1.0]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        with torch.inference_mode():
            logits = BIG[1].module(torch.tensor([[*prompt, 7, *path(tree, parent)]])).logits[0, -1]
        values.append(values[parent] * float(warp(logits, SamplingSetting(0.7))[tree.tokens[node]]))
    return sorted(values[1:], reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 12])
def test_optimal_search_finds_the_most_probable_tokens_of_all(batch):
    """Theorem 3, SALF & TALF paper, against brute force."""
    for seed in range(3):
        tree, prompt = drafted(Optimal(nodes=12, batch=batch), seed, room=4)
        expected = most_probable(tuple(prompt), 12, 4)
        assert probabilities(tree, prompt) == pytest.approx(expected, rel=1e-4)


def test_gains_fall_from_pass_to_pass_and_a_threshold_stops_them():
    """Theorem 1, SALF & TALF paper."""
    for seed in range(5):
        policy = Optimal(nodes=30, batch=4)
        drafted(policy, seed)
        assert len(policy.gains) > 3 and all(a >= b - 1e-9 for a, b in pairwise(policy.gains))
        stopped = Salf(nodes=30, batch=4, threshold=0.4)
        tree, _ = drafted(stopped, seed)
        assert len(stopped.gains) <= len(policy.gains) and all(
            gain >= 0.4 for gain in stopped.gains[:-1]
        )
        popped = 1 + 4 * (len(stopped.gains) - 1)  # the root alone in the first pass
        assert len(tree) == min(popped, 31)


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


def test_dynatree_learns_from_the_fraction_of_the_last_draft_that_was_committed():
    """With a window of one, a step is aggressive or conservative by that one fraction."""
    target, draft = BIG
    prompt, drafter = [3, 1, 4, 1, 5], LMDrafter(draft)
    policy = DynaTree(DynaTreeConfig(window=1, low=0.29, high=0.31, stop=0.001, prune=0.0))
    with torch.inference_mode():
        features = target.hidden(torch.tensor([prompt]), torch.arange(5)[None], None, None)[0]
        drafter.start(prompt, 7, features, RAW)
        state = DecodingState(7, 6, 100, RAW, warp(target.logits(features[-1]), RAW), features[-1])
        tree = policy.draft(state, drafter, Rng.seeded(0))
        drafted = len(tree) - 1
        history = state.memory[policy]
        assert (
            history.drafted == drafted
            and len(tree) - 1 > max(tree.depth) > 3
            and history.depth == 5
        )
        state.tau = 3
        policy.draft(state, drafter, Rng.seeded(0))
    move = (3 / drafted > 0.31) - (3 / drafted < 0.29)
    assert move and history.depth == 5 + move
    assert (history.confident_low, history.confident_high) == pytest.approx(
        (0.4 - 0.05 * move, 0.9 - 0.05 * move)
    )


def every_shape(nodes: int, depth: int, width: int):
    """All ordered trees of up to `nodes` drafted tokens."""
    if not nodes or not depth:
        return [()]
    shapes = [()]
    for count in range(1, width + 1):
        for parts in product(every_shape(nodes - 1, depth - 1, width), repeat=count):
            if sum(1 + size(part) for part in parts) <= nodes:
                shapes.append(parts)
    return shapes


def size(shape) -> int:
    return sum(1 + size(child) for child in shape)


def accepted(shape, rates) -> float:
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


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_a_full_context_leaves_the_root_alone(make):
    tree, _ = drafted(make(), room=0)
    assert len(tree) == 1


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: Beam(nodes=0), "nodes=0"),
        (lambda: Salf(threshold=1.5), "threshold=1.5"),
        (lambda: DynaTreeConfig(confident_low=0.9, confident_high=0.4), "confident_low=0.9"),
        (lambda: sequoia_shape([], 4, 4), "rates="),
        (lambda: Shaped((), "magic"), "magic"),
        (lambda: Delayed(Action(0, 2, 2)), "k=0"),
        (lambda: ConfidenceStop(1.0), "threshold=1.0"),
        (lambda: ConfidenceStop(by="mode"), "by=mode"),
        (lambda: FollowMean(window=0), "window=0"),
        (lambda: NgramConfig(min_size=0), r"ngram\.min_size=0: it should be greater than or equal"),
        (lambda: NgramConfig(3, 2), r"ngram\.min_size=3 is larger than ngram\.max_size=2"),
    ],
)
def test_settings_that_cannot_work_are_named(make, words):
    with pytest.raises(UserError, match=words):
        make()
