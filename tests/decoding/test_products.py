"""Products with large matrices: every way gives torch's numbers, and changed weights are seen."""

from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nde_talf import CausalModel
from nde_talf.decoding.models.forward import cpu_products, onednn
from nde_talf.decoding.models.forward.cpu_products import choose_product
from tests.decoding.families import FAMILIES, module
from tests.refusal import refusal

needs_onednn = pytest.mark.skipif(not onednn.has_onednn(), reason="this torch has no oneDNN")
WAYS = ("plain", "onednn", "packed")


@pytest.fixture
def all_are_large(monkeypatch):
    """Take matrices of any size for large ones."""
    monkeypatch.setattr(onednn, "LEAST", 1)
    monkeypatch.setattr(cpu_products, "LEAST", 1)


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
def test_weights_are_packed_where_there_is_memory_and_a_users_module_is_not(
    all_are_large, monkeypatch
):
    model = module(*FAMILIES["llama-3"])
    assert CausalModel(model).native.way == "onednn"
    assert choose_product(model, packs=True) == "packed"
    monkeypatch.setattr(cpu_products.psutil, "virtual_memory", lambda: SimpleNamespace(available=9))
    assert choose_product(model, packs=True) == "onednn"


def test_without_onednn_products_are_plain_and_others_are_refused(all_are_large, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    monkeypatch.setattr(cpu_products, "has_onednn", run_path(onednn.__file__)["has_onednn"])
    assert not cpu_products.has_onednn(torch.bfloat16)
    model = module(*FAMILIES["llama-3"])
    assert CausalModel(model).native.way == "plain"
    with refusal("oneDNN has no"):
        choose_product(model, "packed")
    with refusal("choose one of auto, plain, onednn, packed"):
        choose_product(model, "fast")
