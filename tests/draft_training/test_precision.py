"""Precision: what `auto` chooses, that results say it, and heads beside a target in bfloat16."""

import json
from dataclasses import replace

import pytest
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.evaluate import held_out_report
from nde_talf.draft_training.export import NOTE, load_head, save_head
from nde_talf.draft_training.lm_settings import LanguageModelConfig
from nde_talf.draft_training.muon import orthogonalised
from nde_talf.draft_training.precision import NATIVE, cast_once, native_bfloat16, resolved
from nde_talf.draft_training.settings import EagleLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import HeadModule, build_head, fit_head
from nde_talf.draft_training.train_lm import LanguageModel, build_llama, fit
from nde_talf.draft_training.train_lm import held_out_report as pair_report
from tests.draft_training.heads import (
    FAMILIES,
    KillBefore,
    batch_of,
    family_target,
    same,
    tiny_target,
)

TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=2), roots=2, steps=3, batch=2, warm_up=1, checkpoint_seconds=0
)
CHOSEN = {"1": "bf16-mixed", "0": "32-true"}


@pytest.fixture(params=CHOSEN)
def native(request, monkeypatch):
    """Whether the machine is taken to have bfloat16."""
    monkeypatch.setenv(NATIVE, request.param)
    return request.param


def test_auto_is_bfloat16_where_it_is_native(native):
    assert native_bfloat16() == native_bfloat16(torch.device("cpu")) == (native == "1")
    assert resolved("auto") == CHOSEN[native] and resolved("32-true") == "32-true"


def test_another_word_is_refused(monkeypatch):
    monkeypatch.setenv(NATIVE, "yes")
    with pytest.raises(UserError, match=f"{NATIVE}=yes"):
        native_bfloat16()


def test_unset_the_machine_is_asked(monkeypatch):
    monkeypatch.setenv(NATIVE, "")
    for there in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda there=there: there)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert native_bfloat16(torch.device("cpu")) == there


@pytest.mark.slow
def test_a_head_says_in_what_it_was_trained(native, target, rows, tmp_path, capsys):
    head = fit_head(target, rows, TINY, tmp_path / "training")
    assert f"precision: {CHOSEN[native]}" in capsys.readouterr().out
    assert (
        head.trained_in
        == held_out_report(head, target, TokenRows.plain(rows), k=2, depth=2)["trained_in"]
        == CHOSEN[native]
    )
    folder = save_head(head, tmp_path / "export")
    assert (
        json.loads((folder / "config.json").read_text())[NOTE]["trained_in"]
        == load_head(folder, target).trained_in
    )
    assert load_head(folder, target).trained_in == CHOSEN[native]


def test_the_precisions_differ_and_a_named_one_is_the_same_on_both_machines(
    target, rows, tmp_path, monkeypatch
):
    heads = {}
    for native in CHOSEN:
        monkeypatch.setenv(NATIVE, native)
        for asked in ("auto", "32-true"):
            heads[native, asked] = fit_head(
                target, rows, replace(TINY, precision=asked), tmp_path / f"{native}-{asked}"
            )
    assert not same(heads["1", "auto"], heads["0", "auto"])
    assert same(heads["1", "32-true"], heads["0", "32-true"]) and same(
        heads["0", "auto"], heads["0", "32-true"]
    )


def test_a_training_does_not_go_on_in_another_precision(target, rows, tmp_path, monkeypatch):
    monkeypatch.setenv(NATIVE, "1")
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, TINY, tmp_path, callbacks=[KillBefore(2)])
    monkeypatch.setenv(NATIVE, "0")
    with pytest.raises(UserError, match="began in precision bf16-mixed"):
        fit_head(target, rows, TINY, tmp_path)


def test_language_models_say_in_what_they_were_trained(native, rows, tmp_path, capsys):
    config = LanguageModelConfig(
        hidden=16, layers=1, heads=2, intermediate=16, steps=2, batch=2, warm_up=1
    )
    model = fit(LanguageModel(build_llama(config, 29), config), rows, tmp_path / "training")
    assert f"precision: {CHOSEN[native]}" in capsys.readouterr().out
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    own = CausalModel(again)
    reported = pair_report(own, own, rows)["trained_in"]
    assert reported == {"target": CHOSEN[native], "draft": CHOSEN[native]}
    again.config.trained_in = None
    assert "trained_in" not in pair_report(own, own, rows)


def test_muon_computes_in_the_precision_that_is_asked_for():
    matrices = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    exact = orthogonalised(matrices, bfloat16=False)
    assert 0 < (orthogonalised(matrices, bfloat16=True) - exact).abs().max() < 0.1


MASTERS = replace(TINY, precision="32-true")


def halved(target: CausalModel) -> CausalModel:
    return CausalModel(target.module.to(torch.bfloat16), target.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_angles_at_8192_are_those_of_float32_beside_a_target_in_bfloat16(family):
    exact, coarse = (
        build_head(target, MASTERS)
        for target in (family_target(family), halved(family_target(family)))
    )
    at = torch.tensor([[0, 512, 2048, 8192]])
    for head in (coarse, coarse.to(torch.bfloat16).to(torch.float32)):
        for one, other in zip(
            head.angles(torch.zeros(1), at), exact.angles(torch.zeros(1), at), strict=True
        ):
            assert torch.equal(one, other)


def test_a_loaded_head_has_the_targets_dtype_but_tables_in_float32(tmp_path):
    target = halved(tiny_target())
    head = load_head(save_head(build_head(target, MASTERS), tmp_path / "head"), target)
    assert head.dtype == torch.bfloat16 and head.rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("autocast", [True, pytest.param(False, marks=pytest.mark.law)])
def test_the_same_100_steps_beside_a_target_in_bfloat16_end_with_the_same_loss(rows, autocast):
    """At the SALF & TALF paper's rate, at which a weight of size 1 in bfloat16 would not move."""
    config = replace(MASTERS, loss=EagleLoss(), steps=100, optimizer="adamw", lr_adam=3e-4)
    batches, ended = [batch_of(rows[at : at + 2, :8]) for at in range(0, 24, 2)], []
    for target in (CausalModel(halved(tiny_target()).module.float()), halved(tiny_target())):
        start, head = (build_head(target, config) for _ in range(2))
        module = HeadModule(head, config)
        (adamw,) = module.configure_optimizers()
        for step in range(config.steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss, _ = module.loss(batches[step % len(batches)], step)
            adamw.zero_grad()
            loss.backward()
            adamw.step()
        assert all(weight.dtype == torch.float32 for weight in head.parameters())
        norm, before = (each.layers[0].post_attention_layernorm.weight for each in (head, start))
        assert (norm != before).float().mean() > 0.9
        assert (head.fc.weight != start.fc.weight).float().mean() > 0.9
        ended.append(module.loss(batch_of(rows), 0)[0].item())
    assert ended[1] == pytest.approx(ended[0], rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_target_cast_once_gives_the_same_loss_bit_for_bit_and_comes_back_as_it_was(tied):
    target = family_target("qwen2", tied)
    module = HeadModule(build_head(target, MASTERS), replace(MASTERS, chain_fraction=0.0))
    before = {name: weight.clone() for name, weight in target.module.state_dict().items()}
    rows = torch.arange(24).view(2, 12) % 29

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return module.loss(batch_of(rows), 0)[0].item()

    each_pass, cast = loss(), {}
    with pytest.raises(ZeroDivisionError), cast_once(target.module, "bf16-mixed"):
        once = loss()
        cast = {name: weight.dtype for name, weight in target.module.named_parameters()}
        raise ZeroDivisionError
    assert once == each_pass
    assert (
        cast["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
        and cast["model.norm.weight"] == torch.float32
    )
    assert cast["model.embed_tokens.weight"] == torch.float32 and tied != ("lm_head.weight" in cast)
    after = target.module.state_dict()
    assert all(
        torch.equal(weight, before[name]) and weight.dtype == before[name].dtype
        for name, weight in after.items()
    )
