"""What `auto` chooses on a machine with native bfloat16 and on one without, and that every result
says which it was.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.evaluate import held_out_report
from nde_talf.draft_training.export import NOTE, load_head, save_head
from nde_talf.draft_training.lm_settings import LanguageModelConfig
from nde_talf.draft_training.muon import orthogonalised
from nde_talf.draft_training.precision import NATIVE, native_bfloat16, resolved
from nde_talf.draft_training.settings import HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import fit_head
from nde_talf.draft_training.train_lm import LanguageModel, build_llama, fit
from nde_talf.draft_training.train_lm import held_out_report as pair_report
from tests.draft_training.heads import KillBefore, same

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
    assert resolved() == CHOSEN[native] and resolved("16-mixed") == "16-mixed"


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


@pytest.mark.parametrize("major,there", [(7, False), (8, True)])
def test_a_gpu_that_emulates_bfloat16_does_not_have_it(monkeypatch, major, there):
    """A T4 (7.5) takes bfloat16 and multiplies it without its tensor cores."""
    monkeypatch.setenv(NATIVE, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major)
    )
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert native_bfloat16(torch.device("cuda")) == there


@pytest.mark.slow
def test_a_head_says_in_what_it_was_trained(native, target, rows, tmp_path, capsys):
    head = fit_head(target, rows, TINY, tmp_path / "training")
    assert f"precision: {CHOSEN[native]} (auto: this machine" in capsys.readouterr().out
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
