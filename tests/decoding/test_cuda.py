"""On a GPU: every method, and graphs, give the plain path's tokens."""

import pytest
import torch
from torch.nn import functional as F

from nde_talf import (
    Action,
    Autoregressive,
    Beam,
    CausalModel,
    Delayed,
    LMDrafter,
    Rng,
    SamplingSetting,
    Shaped,
    SpeculativeDecoder,
    StaticShapes,
    fixed_shape,
)
from nde_talf.decoding.models.forward import attention
from nde_talf.decoding.models.forward.attention import attend, seen_in
from nde_talf.decoding.models.forward.seen import Seen
from nde_talf.decoding.models.forward.split_attention import has_flash
from tests.decoding.pairs import tiny_pair

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def pair():
    return [CausalModel(model.module.cuda()) for model in tiny_pair(64, hidden=32, layers=2)]


FORK, BEAM = Delayed(Action(3, 2, 2)), Beam(3, 3, 9)
FIXED = {trees: Shaped(fixed_shape(3, 3, 12), trees) for trees in ("iid", "without_replacement")}
METHODS = [
    *((name, FORK, False) for name in ("naivetree", "spectr", "khisti", "gbv", "traversal")),
    *(("specinfer", FORK, graphs) for graphs in (False, True)),
    *(("nss", BEAM, graphs) for graphs in (False, True)),
    ("traversal", FIXED["iid"], False),
    ("without_replacement", FIXED["without_replacement"], False),
]


@pytest.mark.parametrize("name,policy,graphs", METHODS)
def test_a_gpu_writes_what_the_target_does(pair, name, policy, graphs):
    target, draft = pair
    static = StaticShapes(256, rows=32) if graphs else None
    decoder = SpeculativeDecoder(target, LMDrafter(draft, static), policy, name, static=static)
    plain = SpeculativeDecoder(target, None, Autoregressive(), "nss")
    greedy = SamplingSetting(0.0)
    expected = plain.generate(PROMPT, 100, greedy, Rng.seeded(0)).tokens
    there = Rng(torch.Generator("cuda"))
    assert decoder.generate(PROMPT, 100, greedy, there).tokens == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [20, 64, 256])
@torch.inference_mode()
def test_attention_in_two_parts_is_plain_attention(dtype, size, monkeypatch):
    monkeypatch.setattr(attention, "OPEN", 600)
    generator = torch.Generator("cuda").manual_seed(0)
    query, keys, values = (
        torch.randn(1, count, rows, size, generator=generator, device="cuda").to(dtype)
        for count, rows in ((4, 5), (2, 605), (2, 605))
    )
    mask = torch.full((1, 1, 5, 5), torch.finfo(dtype).min, dtype=dtype, device="cuda").triu_(1)
    seen = seen_in(None, mask, torch.arange(600, 605, device="cuda")[None], None, 600, dtype, 2)
    assert bool(seen.text) == has_flash(query.device, dtype)
    wide = torch.cat([torch.zeros(1, 1, 5, 600, device="cuda"), mask], -1)
    for view, slots, blocked in ((seen, 605, wide), (Seen(alone=True), 5, mask)):
        held = [states[:, :, :slots] for states in (keys, values)]
        attended = attend(query, *held, view, 0.2).view(1, 5, 4, size).transpose(1, 2)
        whole = (states.float().repeat_interleave(2, 1) for states in held)
        expected = F.scaled_dot_product_attention(query.float(), *whole, blocked.float(), scale=0.2)
        torch.testing.assert_close(
            attended.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2
        )
