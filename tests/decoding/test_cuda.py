"""On a GPU: graphs give the plain path's tokens, and torch's own detector finds one synchronisation
a step.
"""

import warnings

import pytest
import torch
from torch.nn import functional as F

from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.forward.attention import Seen, attend, has_flash, seen_in
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed, FollowTau
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.static import StaticShapes
from tests.decoding.pairs import tiny_pair

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def pair():
    return [CausalModel(model.module.cuda()) for model in tiny_pair(64, hidden=32, layers=2)]


@pytest.mark.parametrize("name", ["specinfer", "traversal", "nss"])
def test_graphs_write_what_the_target_writes_on_its_own(pair, name):
    target, draft = pair
    static, greedy = StaticShapes(256, rows=32), SamplingSetting(0.0)
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["nss"])
    warm = SamplingSetting(0.7)
    fast = SpeculativeDecoder(
        target, LMDrafter(draft, static), FollowTau(2, 2, 4), VERIFIERS[name], warm, static
    )
    for seed in range(3):
        expected = plain.generate(PROMPT, 100, greedy, Rng.seeded(0)).tokens
        assert fast.generate(PROMPT, 100, greedy, Rng.seeded(seed)).tokens == expected


@pytest.mark.parametrize("static", [None, StaticShapes(256, rows=32)], ids=["plain", "graphs"])
@pytest.mark.parametrize("setting", [SamplingSetting(1.0), SamplingSetting(0.7, 0.9)], ids=str)
def test_a_step_waits_once(pair, static, setting):
    target, draft = pair
    drafter, policy = LMDrafter(draft, static), Delayed(Action(3, 2, 2))
    one_wait_a_step(
        SpeculativeDecoder(target, drafter, policy, VERIFIERS["specinfer"], static=static), setting
    )


@pytest.mark.parametrize("name", ["naivetree", "spectr", "khisti", "gbv", "traversal"])
def test_every_rule_for_delayed_trees_waits_once(pair, name):
    target, draft = pair
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(3, 2, 2)), VERIFIERS[name]
    )
    one_wait_a_step(decoder, SamplingSetting(0.7, 0.9))


@pytest.mark.parametrize(
    "trees,name",
    [("iid", "traversal"), ("without_replacement", "without_replacement"), ("top_k", "nss")],
)
def test_fixed_shapes_wait_once(pair, trees, name):
    target, draft = pair
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Shaped(fixed_shape(3, 3, 12), trees), VERIFIERS[name]
    )
    one_wait_a_step(decoder, SamplingSetting(0.7, 0.9))


@pytest.mark.parametrize("static", [None, StaticShapes(256, rows=32)], ids=["plain", "graphs"])
def test_a_beam_waits_once_and_writes_what_the_target_does(pair, static):
    target, draft = pair
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft, static), Beam(3, 3, 9), VERIFIERS["nss"], static=static
    )
    one_wait_a_step(decoder, SamplingSetting(0.7, 0.9))
    plain, greedy = (
        SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["nss"]),
        SamplingSetting(0.0),
    )
    expected = plain.generate(PROMPT, 100, greedy, Rng.seeded(0)).tokens
    assert decoder.generate(PROMPT, 100, greedy, Rng.seeded(0)).tokens == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [20, 64, 256])
@torch.inference_mode()
def test_attention_in_two_parts_is_plain_attention(dtype, size):
    generator = torch.Generator("cuda").manual_seed(0)
    query, keys, values = (
        torch.randn(1, count, rows, size, generator=generator, device="cuda").to(dtype)
        for count, rows in ((4, 5), (2, 605), (2, 605))
    )
    mask = torch.full((1, 1, 5, 5), torch.finfo(dtype).min, dtype=dtype, device="cuda").triu_(1)
    seen = seen_in(None, mask, torch.arange(600, 605, device="cuda")[None], None, 600, dtype, 2)
    assert (seen.open < seen.tree) == has_flash(query.device, dtype)
    wide = torch.cat([torch.zeros(1, 1, 5, 600, device="cuda"), mask], -1)
    keys_of_all, values_of_all = (
        states.float().repeat_interleave(2, 1) for states in (keys, values)
    )
    expected = F.scaled_dot_product_attention(
        query.float(), keys_of_all, values_of_all, wide, scale=0.2
    )
    split = Seen(0, 0, 600, mask.repeat(1, 1, 2, 1))  # also where there is no flash attention
    for own in (seen, split):
        found = attend(query, keys, values, own, 0.2).view(1, 5, 4, size).transpose(1, 2)
        torch.testing.assert_close(
            found.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2
        )
    first = (
        attend(query, keys[:, :, :5], values[:, :, :5], Seen(causal=True), 0.2)
        .view(1, 5, 4, size)
        .transpose(1, 2)
    )
    expected = F.scaled_dot_product_attention(
        query.float(), keys_of_all[:, :, :5], values_of_all[:, :, :5], is_causal=True, scale=0.2
    )
    torch.testing.assert_close(
        first.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_on_a_gpu_that_is_not_the_current_one():
    target, draft = (
        CausalModel(model.module.to("cuda:1")) for model in tiny_pair(64, hidden=32, layers=2)
    )
    found = []
    for static in (None, StaticShapes(256, rows=32)):
        decoder = SpeculativeDecoder(
            target, LMDrafter(draft, static), Delayed(Action(3, 1, 2)), "specinfer", static=static
        )
        found.append(decoder.generate(PROMPT, 60, SamplingSetting(0.7), Rng.seeded(0)).tokens)
    assert found[0] == found[1]


def one_wait_a_step(decoder: SpeculativeDecoder, setting: SamplingSetting) -> None:
    stream = decoder.stream(PROMPT, setting, Rng.seeded(0))
    for _ in range(20):  # every size has its graph by then
        next(stream)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for _ in range(10):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                next(stream)
            assert len([w for w in found if "synchroniz" in str(w.message)]) == 1, [
                str(w.message) for w in found
            ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
