"""Products with large matrices: every way gives torch's numbers, and changed weights are seen."""

from runpy import run_path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nde_talf import CausalModel
from nde_talf.decoding.models.forward import cpu_products as fastest
from nde_talf.decoding.models.forward import fused_weights, onednn
from tests.decoding.families import FAMILIES, module
from tests.refusal import refusal

needs_onednn = pytest.mark.skipif(not onednn.has_onednn(), reason="this torch has no oneDNN")
WAYS = ("plain", "onednn", "packed", "onednn-many", "packed-many")


@pytest.fixture
def all_are_large(monkeypatch, tmp_path):
    """Take matrices of any size for large ones, and keep the answers in a folder of the test."""
    monkeypatch.setattr(onednn, "LEAST", 1)
    monkeypatch.setattr(fused_weights, "LEAST", 1)
    monkeypatch.setattr(fastest, "LEAST", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def linears(count, bias):
    torch.manual_seed(0)
    return [nn.Linear(24, 8 * (1 + i), bias) for i in range(count)]


# oneDNN takes bfloat16 on CPUs with AVX-512 alone.
TYPES = [*filter(onednn.has_onednn, (torch.float32, torch.bfloat16))]


@needs_onednn
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count,bias", [(1, False), (3, True)])
def test_every_way_is_the_product_of_torch(all_are_large, monkeypatch, way, dtype, count, bias):
    monkeypatch.setattr(onednn, "LARGE", 1 if bias else 1 << 19)
    parts = [part.to(dtype) for part in linears(count, bias)]
    multiply = onednn.linear(parts, way)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for rows in (1, 5, 33, 130):
        states = torch.randn(rows, 24).to(dtype)
        theirs = torch.cat([F.linear(states, part.weight, part.bias) for part in parts], -1)
        with torch.inference_mode():
            torch.testing.assert_close(multiply(states), theirs, atol=bound, rtol=bound)
            assert multiply(states[None, :, None]).shape == (1, rows, 1, theirs.shape[-1])


@needs_onednn
@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_autocast_pass_by_onednn(all_are_large, way):
    multiply, states = onednn.linear(linears(2, True), way), torch.randn(3, 24, requires_grad=True)
    multiply(states).sum().backward()
    assert states.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert multiply(states).dtype == torch.bfloat16


def read(model):
    session = model.session()
    session.append([1, 2])
    return model.logits(session.grow([4, 5, 6], [-1, 0, 0]))


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("name", ["llama-3", "qwen2", "gemma-3"])
@torch.inference_mode()
def test_packed_weights_are_a_copy_that_follows_the_models(all_are_large, tmp_path, name):
    module(*FAMILIES[name]).save_pretrained(tmp_path / "model")
    plain, packed = (
        CausalModel.load(tmp_path / "model", products=way) for way in ("plain", "packed")
    )
    assert packed.forward.endswith("large products: packed)")
    assert packed.native.layers[0].down.weight.is_mkldnn
    torch.testing.assert_close(read(packed), read(plain), atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, packed.module.parameters(), plain.module.parameters()))
    for model in (plain, packed):
        model.body.layers[0].mlp.down_proj.weight.mul_(3)
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(read(packed), read(plain), atol=1e-4, rtol=1e-4)


@needs_onednn
def test_the_fastest_way_is_remembered_and_a_users_module_is_not_packed(
    all_are_large, tmp_path, monkeypatch
):
    model = module(*FAMILIES["llama-3"])
    assert fastest.fastest(model) in ("plain", "onednn", "onednn-many")
    assert fastest.fastest(model, packs=True) in WAYS
    files = list((tmp_path / "cache/nde-talf").glob("products-*.json"))
    assert len(files) == 2
    monkeypatch.setattr(fastest, "_times", None)  # nothing is timed again
    for file in files:
        file.write_text('{"way": "onednn-many"}')
    assert fastest.fastest(model, packs=True) == "onednn-many"


def test_every_shape_of_the_layers_is_timed(monkeypatch):
    monkeypatch.setattr(fastest, "BYTES", 40)
    matrices = [torch.ones(rows, 3) for rows in (2, 2, 4, 4, 9)]
    assert [*map(len, fastest._some(matrices))] == [2, 4]


@needs_onednn
def test_one_row_goes_plainly_where_that_is_faster(all_are_large, monkeypatch):
    times = {"plain": [1.0, 4.0], "packed": [1.3, 2.0]}
    monkeypatch.setattr(fastest, "_times", lambda *_: times)
    assert fastest.fastest(module(*FAMILIES["llama-3"]), packs=True) == "packed-many"
    parts = linears(2, True)
    product, counts = onednn.linear(parts, "packed-many"), []
    real = onednn.in_blocks
    monkeypatch.setattr(onednn, "in_blocks", lambda x, *own: counts.append(len(x)) or real(x, *own))
    for count in (1, 2):
        states = torch.randn(count, 24)
        with torch.inference_mode():
            ours = product(states)
        torch.testing.assert_close(ours, torch.cat([part(states) for part in parts], -1))
    assert counts == [2]


@needs_onednn
@pytest.mark.parametrize("fails", ["in_blocks", "packed"])
def test_a_way_that_cannot_multiply_the_weights_is_not_chosen(all_are_large, monkeypatch, fails):
    def refuse(*_):
        raise RuntimeError("bf16 path needs the cpu support avx512")

    monkeypatch.setattr(fastest, fails, refuse)
    left = {"plain", "onednn"} if fails == "packed" else {"plain"}
    assert set(fastest._times([torch.ones(24, 24)], True)) == left
    model = CausalModel(module(*FAMILIES["llama-3"]), packs=True)
    assert not model.native.way.startswith("packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_shape_and_type_have_a_product(all_are_large, dtype):
    for shape in ((1, 1), (1, 37), (517, 3), (131, 257)):
        parts = [nn.Linear(*shape).to(dtype), nn.Linear(*shape).to(dtype)]
        way = fastest.fastest(nn.ModuleList(parts), packs=True)
        states = torch.randn(3, shape[0]).to(dtype)
        with torch.inference_mode():
            ours = onednn.linear(parts, way)(states).double()
        theirs = torch.cat([part.double()(states.double()) for part in parts], -1)
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_without_onednn_products_are_plain_and_others_are_refused(all_are_large, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    monkeypatch.setattr(fastest, "has_onednn", run_path(onednn.__file__)["has_onednn"])
    assert not fastest.has_onednn(torch.bfloat16)
    model = module(*FAMILIES["llama-3"])
    assert CausalModel(model).native.way == "plain"
    with refusal("oneDNN has no"):
        fastest.fastest(model, "packed")
    with refusal("choose one of auto, plain, onednn, packed"):
        fastest.fastest(model, "fast")
