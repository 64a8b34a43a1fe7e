"""The loop with real (tiny) models: greedy equality, caches, streaming and bad input."""

import gc
import weakref
from itertools import count

import pytest
import torch

from nde_talf import Action, Delayed, LMDrafter, Rng, SamplingSetting, SpeculativeDecoder
from nde_talf.decoding.models.cache import KVCache
from tests.decoding.pairs import tiny_pair

GREEDY = SamplingSetting(0.0)


def test_streamed_blocks_are_the_generation():
    target, draft = tiny_pair(16)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), Delayed(Action(2, 1, 2)), "traversal")
    for seed in range(4):
        asked = [1, 2, 3], 50, SamplingSetting(), Rng.seeded(seed), (5, 9)
        stream, streamed, accepted = decoder.blocks(*asked), [], []
        for block in stream:
            streamed += block.tokens
            accepted.append(block.accepted)
            assert stream.generation.tokens == streamed  # as far as it has come
        generation = decoder.generate(*asked[:3], Rng.seeded(seed), (5, 9))
        assert generation.tokens == streamed
        assert accepted[0] == 0 and accepted[1:-1] == [step.tau for step in generation.steps[:-1]]
        stops = [index for index, token in enumerate(streamed) if token in (5, 9)]
        assert stops in ([], [len(streamed) - 1])  # a stop token ends it, and is the only one


def test_statistics_add_up():
    target, draft = tiny_pair(16)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), Delayed(Action(3, 1, 2)), "specinfer")
    ticks = count()
    decoder.tick = lambda: next(ticks)  # a second passes from one look at the clock to the next
    generation = decoder.generate([1, 2, 3], 200, SamplingSetting(), Rng.seeded(0))
    elapsed, stats = next(ticks) - 1, generation.stats
    steps = len(generation.steps)
    assert stats.block_efficiency == generation.decoded / steps
    assert stats.tokens_per_pass == (generation.decoded + 1) / (steps + 1)
    assert sum(stats.nodes.values()) == steps and set(stats.nodes) <= set(range(4, 9))
    assert stats.mean_nodes == sum(step.nodes for step in generation.steps) / steps
    assert (
        set(stats.seconds) == {"draft", "target", "verify", "policy", "other"}
        and min(stats.seconds.values()) >= 0
    )
    # Nothing but the consumer's own time is left out: between the prefill and the first step, and
    # between steps.
    assert stats.ttft + sum(stats.seconds.values()) == elapsed - steps
    assert stats.tpot * generation.decoded == pytest.approx(sum(stats.seconds.values()))
    weights = sum(weight.nbytes for weight in target.module.parameters())
    assert stats.peak_bytes > weights


@pytest.mark.parametrize("layers,expected", [(None, 0), (3, 0), (3, 600)])
def test_the_cache_keeps_gathers_and_grows(layers, expected):
    """Against keys and values kept in plain tensors; layers of unequal shape share nothing."""
    cache, generator = KVCache(layers, expected), torch.Generator().manual_seed(0)
    shapes = [(1, 2, 0, 4), (1, 2, 0, 4), (1, 3, 0, 2)]
    plain = [(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]
    for turn in range(60):
        for layer, shape in enumerate(shapes):
            new = [
                torch.randn(*shape[:2], 1 + turn % 17, shape[3], generator=generator)
                for _ in range(2)
            ]
            plain[layer] = tuple(torch.cat(pair, 2) for pair in zip(plain[layer], new, strict=True))
            held = cache.update(*new, layer)
            assert all(torch.equal(*pair) for pair in zip(held, plain[layer], strict=True))
        length = plain[0][0].shape[2] - 1 - turn % 17
        kept = sorted(
            {
                length,
                *torch.randint(length, plain[0][0].shape[2], (3,), generator=generator).tolist(),
            }
        )
        cache.commit(length, kept)
        plain = [tuple(x[:, :, [*range(length), *kept]] for x in pair) for pair in plain]
        assert cache.length == length + len(kept)


def test_a_dropped_cache_is_freed_at_once():
    """Not when the garbage collector comes round: its buffers are most of what decoding allocates."""
    cache = KVCache(2)
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    layer = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None
    finally:
        gc.enable()
