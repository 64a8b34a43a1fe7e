"""Precision: what `auto` chooses, that results say it, and heads beside a target in bfloat16."""

from dataclasses import replace

import pytest
import torch

from nde_talf import CausalModel
from nde_talf.decoding.models.precision import NATIVE, type_of_draft
from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.training.head_training import HeadModule, build_head, fit_head
from nde_talf.draft_training.training.precision import cast_once
from nde_talf.draft_training.training_settings import HeadConfig, TalfLoss
from tests.draft_training.heads import FAMILIES, KillBefore, batch_of, family_target, same
from tests.refusal import refusal

TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=2), roots=2, steps=3, batch=2, warm_up=1, checkpoint_seconds=0
)
FLOAT32 = replace(TINY, precision="32-true", chain_fraction=0.0)


def test_a_draft_is_bfloat16_where_it_is_native(monkeypatch):
    for native, kind in ("1", "bfloat16"), ("0", "float32"):
        monkeypatch.setenv(NATIVE, native)
        assert type_of_draft("auto", "float32", "cpu") == kind
    assert type_of_draft("auto", "float16", "cpu") == "float16"
    monkeypatch.setenv(NATIVE, "yes")
    with refusal(f"{NATIVE}=yes"):
        type_of_draft("auto", "float32", "cpu")


@pytest.mark.slow
def test_the_precisions_differ_are_told_and_are_not_changed_on_the_way(
    target, rows, tmp_path, monkeypatch
):
    heads = {}
    for native, chosen in ("1", "bf16-mixed"), ("0", "32-true"):
        monkeypatch.setenv(NATIVE, native)
        for asked in ("auto", "32-true"):
            config = replace(TINY, precision=asked)
            heads[native, asked] = fit_head(target, rows, config, tmp_path / f"{native}-{asked}")
        auto = heads[native, "auto"]
        exported = load_head(save_head(auto, tmp_path / f"export-{native}"), target)
        assert auto.trained_in == exported.trained_in == chosen
    assert not same(heads["1", "auto"], heads["0", "auto"])
    assert same(heads["1", "32-true"], heads["0", "32-true"])
    assert same(heads["0", "auto"], heads["0", "32-true"])
    monkeypatch.setenv(NATIVE, "1")
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, TINY, tmp_path / "killed", callbacks=[KillBefore(2)])
    monkeypatch.setenv(NATIVE, "0")
    with refusal(r"other settings .*\(precision chosen"):
        fit_head(target, rows, TINY, tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_angles_at_8192_are_those_of_float32_beside_a_target_in_bfloat16(family, tmp_path):
    target = family_target(family)
    at = torch.zeros(1), torch.tensor([[0, 512, 2048, 8192]])
    exact = torch.stack(build_head(target, TINY).angles(*at))
    coarse = build_head(CausalModel(target.module.to(torch.bfloat16), target.name), TINY)
    for head in (coarse, coarse.bfloat16().float()):
        assert torch.equal(torch.stack(head.angles(*at)), exact)
    loaded = load_head(save_head(coarse, tmp_path / "head"), coarse.target)
    assert loaded.dtype == torch.bfloat16
    assert {table.dtype for table in loaded.rotary.buffers()} == {torch.float32}


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_target_cast_once_gives_the_same_loss_bit_for_bit_and_comes_back_as_it_was(tied):
    target = family_target("qwen2", tied)
    module = HeadModule(build_head(target, FLOAT32), FLOAT32)
    before = {name: weight.clone() for name, weight in target.module.state_dict().items()}
    rows = torch.arange(24).view(2, 12) % 29

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return module.loss(batch_of(rows), 0)[0].item()

    each_pass = loss()
    with pytest.raises(ZeroDivisionError), cast_once(target.module, "bf16-mixed"):
        assert loss() == each_pass
        cast = {name: weight.dtype for name, weight in target.module.named_parameters()}
        assert cast["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
        assert cast["model.norm.weight"] == cast["model.embed_tokens.weight"] == torch.float32
        raise ZeroDivisionError
    for name, weight in target.module.state_dict().items():
        assert torch.equal(weight, before[name]) and weight.dtype == before[name].dtype
