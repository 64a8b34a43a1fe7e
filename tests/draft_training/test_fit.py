"""How a head is trained: from an older one, in parts, in several processes; and what cannot be
trained on.
"""

from dataclasses import replace

import pytest
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.evaluate import held_out_report
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.settings import LOSSES, HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import HeadModule, build_head, fit_head
from nde_talf.draft_training.trainer import train_rows
from tests.draft_training.heads import random_head, same, tiny_target

# Weights are compared to 1e-4, so the precision is not the machine's choice.
TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=3),
    roots=0,
    chain_fraction=0.0,
    steps=6,
    batch=4,
    warm_up=2,
    checkpoint_seconds=60,
    precision="32-true",
)


def close(one, two) -> bool:
    return all(
        torch.allclose(a, b, atol=1e-4, rtol=1e-4)
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
    )


def test_a_warm_start_begins_with_the_exported_weights(target, rows, tmp_path):
    older = random_head(target)
    folder = save_head(older, tmp_path / "head")
    config = replace(TINY, warm_start=str(folder))
    start = build_head(target, config)
    assert all(
        torch.equal(a, b) for a, b in zip(start.parameters(), older.parameters(), strict=True)
    )
    assert start.training and all(weight.requires_grad for weight in start.parameters())
    frozen = fit_head(
        target, rows, replace(config, optimizer="adamw", lr_adam=1e-30), tmp_path / "frozen"
    )
    assert close(frozen, older)
    assert not close(fit_head(target, rows, config, tmp_path / "moved"), older)


def test_a_warm_start_beside_another_target_is_refused(target, rows, tmp_path):
    folder = save_head(random_head(target), tmp_path / "head")
    with pytest.raises(UserError, match="another lm_head"):
        fit_head(tiny_target(seed=3), rows, replace(TINY, warm_start=str(folder)), tmp_path)
    with pytest.raises(UserError, match="no draft head"):
        fit_head(target, rows, replace(TINY, warm_start=str(tmp_path / "nothing")), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_passes_a_step_are_one_of_double_the_rows(target, rows, tmp_path, optimizer):
    config = replace(TINY, optimizer=optimizer)
    whole = fit_head(target, rows, config, tmp_path / "whole")
    parts = fit_head(target, rows, replace(config, batch=2, accumulate=2), tmp_path / "parts")
    assert close(whole, parts)
    assert not close(whole, fit_head(target, rows, replace(config, batch=2), tmp_path / "half"))


@pytest.mark.slow
def test_two_processes_train_like_one_with_double_the_rows(target, rows, tmp_path):
    whole = fit_head(target, rows, TINY, tmp_path / "whole")
    config = replace(TINY, batch=2, devices=2, strategy="ddp_fork")
    assert close(whole, fit_head(target, rows, config, tmp_path / "two"))


def test_processes_that_cannot_be_are_refused_at_once(rows, tmp_path):
    target = tiny_target()
    target.device = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(UserError, match=r"draft\.devices=99"):
        fit_head(target, rows, replace(TINY, strategy="ddp_spawn", devices=99), tmp_path)


def test_a_target_that_cannot_be_moved_cast_or_copied_gets_a_head(rows, tmp_path):
    """As quantised models, and those on several devices.

    Its weights may have types without a sign bit.
    """
    target = tiny_target()

    def refuse(*_, **__):
        raise ValueError("`.to` is not supported for quantised models")

    for name in ("to", "_apply", "__deepcopy__"):
        setattr(target.module, name, refuse)
    head = fit_head(target, rows, TINY, tmp_path)
    projection = target.module.model.layers[0].mlp.up_proj
    projection.weight.data = projection.weight.data.to(torch.float8_e4m3fn)
    loaded = load_head(save_head(head, tmp_path / "head"), target)
    assert same(head, loaded)


def test_one_process_trains_on_the_gpu_that_the_target_is_on(monkeypatch, tmp_path):
    asked = []

    def trainer(**options):
        asked.append(options["devices"])
        raise KeyboardInterrupt

    head = random_head(tiny_target())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("nde_talf.draft_training.trainer.pl.Trainer", trainer)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        head.target.device = device
        with pytest.raises(KeyboardInterrupt):
            train_rows(HeadModule(head, TINY), torch.zeros(4, 8), tmp_path)
    assert asked == [[1], 1]


def test_the_target_follows_the_head_to_the_device_of_a_process():
    """It is no submodule, which Lightning would move."""
    module = HeadModule(random_head(tiny_target()), TINY)
    module.to("meta")
    module.on_fit_start()
    assert module.head.target.device.type == module.head.target.lm_head.weight.device.type == "meta"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["hass", "eagle"])
def test_every_loss_trains(target, rows, tmp_path, loss):
    config = replace(TINY, loss=LOSSES[loss](), steps=40, roots=4)
    trained, fresh = fit_head(target, rows, config, tmp_path), build_head(target, config).eval()
    before, after = (
        held_out_report(head, target, TokenRows.plain(rows), k=2)["kl"] for head in (fresh, trained)
    )
    assert after[0] < 0.8 * before[0]
    assert loss == "eagle" or all(late < early for late, early in zip(after, before, strict=True))


def test_rows_without_anything_to_learn_are_refused_or_passed_over(target, rows, tmp_path):
    silent = TokenRows(rows, torch.zeros_like(rows).bool(), torch.zeros_like(rows))
    with pytest.raises(UserError, match="assistant's turn"):
        fit_head(target, silent, TINY, tmp_path / "silent")
    some = TokenRows(rows, silent.loss.clone(), silent.document)
    some.loss[:8] = True
    one = fit_head(target, some, TINY, tmp_path / "some")
    assert close(one, fit_head(target, rows[:8], TINY, tmp_path / "those"))


def test_rows_shorter_than_the_trees_are_refused(target, rows, tmp_path):
    with pytest.raises(UserError, match=r"too short for draft.loss.depth=3"):
        fit_head(target, rows[:, :4], TINY, tmp_path)
    fit_head(target, rows[:, :5], replace(TINY, loss=HassLoss()), tmp_path)


def test_tokens_outside_the_vocabulary_are_refused(target, rows, tmp_path):
    for other in (rows + target.vocab_size, -rows):
        with pytest.raises(UserError, match="tokenizer"):
            fit_head(target, other, TINY, tmp_path)
