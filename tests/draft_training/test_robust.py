"""A training passes over a few bad steps, keeps what was good and ends with the best weights."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
import pytorch_lightning as pl
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.checkpoint import ResumableCheckpoint
from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.settings import FeatureLabels, HeadConfig, OnlineLabels, TalfLoss
from nde_talf.draft_training.train_head import HeadBatch, HeadModule, fit_head
from nde_talf.draft_training.trainer import BEST, CHECKPOINT, RowBatches
from tests.draft_training.heads import KillBefore, predictable_rows, same, tiny_target

TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=2),
    roots=2,
    steps=8,
    batch=2,
    warm_up=2,
    checkpoint_seconds=0,
    precision="32-true",
)


@pytest.fixture
def broken(monkeypatch):
    """Steps whose gradient is made infinite; a test fills it in."""
    steps, loss = set(), HeadModule.loss

    def poisoned(self, batch, step, part=0):
        total, figures = loss(self, batch, step, part)
        return (total * float("inf") if step in steps else total), figures

    monkeypatch.setattr(HeadModule, "loss", poisoned)
    return steps


class Weights(pl.Callback):
    def __init__(self):
        self.after = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.after[trainer.global_step] = [
            weight.detach().clone() for weight in pl_module.head.parameters()
        ]


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.law)])
def test_a_bad_step_moves_nothing_and_the_training_goes_on(
    target, rows, tmp_path, broken, optimizer, capsys
):
    config, seen = replace(TINY, optimizer=optimizer, gradient_clip=1.0), Weights()
    broken |= {3, 6}
    head = fit_head(target, rows, config, tmp_path / "one", callbacks=[seen])
    for step in range(1, 8):
        moved = any(
            not torch.equal(a, b)
            for a, b in zip(seen.after[step], seen.after[step + 1], strict=True)
        )
        assert moved == (step not in broken)
    assert "step 3: passed over, 1 of at most 10" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, config, tmp_path / "killed", callbacks=[KillBefore(5)])
    assert same(fit_head(target, rows, config, tmp_path / "killed"), head)


def test_too_many_bad_steps_stop_it(target, rows, tmp_path, broken):
    broken |= set(range(3, 30))
    with pytest.raises(UserError, match=r"step 13.*, after 10 such steps"):
        fit_head(target, rows, replace(TINY, steps=20), tmp_path)
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert saved["global_step"] == 3  # the last good one: none is written after a bad step


def test_weights_that_are_not_finite_are_not_written(target, rows, tmp_path, monkeypatch):
    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            if trainer.global_step == 4:
                with torch.no_grad():
                    pl_module.head.fc.weight[0, 0] = float("inf")

    with pytest.raises(UserError, match=r"diverged|not finite"):
        fit_head(target, rows, replace(TINY, steps=20), tmp_path, callbacks=[Spoil()])
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert saved["global_step"] == 4 and all(
        weight.isfinite().all() for weight in saved["state_dict"].values()
    )


def test_an_unfinished_training_takes_no_other_settings(target, rows, tmp_path):
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, TINY, tmp_path, callbacks=[KillBefore(3)])
    with pytest.raises(UserError, match=r"other settings than those of now \(warm_up, loss\)"):
        fit_head(target, rows, replace(TINY, warm_up=3, loss=TalfLoss(k=3, depth=2)), tmp_path)


@pytest.mark.parametrize("labels", [OnlineLabels(), FeatureLabels()])
def test_the_head_is_that_of_the_best_evaluation(target, rows, tmp_path, labels):
    """At a rate at which it gets worse again."""
    config = replace(TINY, evaluate_every=2, lr_muon=0.3, lr_adam=0.3, labels=labels)
    held_out, losses = TokenRows.plain(predictable_rows(target, 12, 30)[24:]), {}

    class Losses(pl.Callback):
        def on_validation_end(self, trainer, *_):
            losses[trainer.global_step] = float(trainer.callback_metrics["held_out_loss"])

    with pytest.raises(ProcessLookupError):
        fit_head(
            target, rows, config, tmp_path, callbacks=[Losses(), KillBefore(5)], held_out=held_out
        )
    head = fit_head(target, rows, config, tmp_path, callbacks=[Losses()], held_out=held_out)
    assert list(losses) == [2, 4, 6, 8]
    best = min(losses, key=losses.get)
    assert torch.load(tmp_path / BEST, weights_only=True)["global_step"] == best
    module = HeadModule(head, config).eval()
    batches = RowBatches(HeadBatch(held_out, torch.arange(6)), 2, 3, config.seed)
    again = (
        torch.stack([module.loss(batch, config.steps, i)[0] for i, batch in enumerate(batches)])
        .mean()
        .item()
    )
    assert (
        again == pytest.approx(losses[best], rel=1e-5)
        and len({round(loss, 4) for loss in losses.values()}) == 4
    )
    final = fit_head(target, rows, config, tmp_path, held_out=held_out)  # finished: the same best
    assert same(head, final)


def test_checkpoints_cost_two_percent_of_the_time(tmp_path, monkeypatch):
    """A clock that a step moves on by 1 s and a checkpoint by 6 s."""
    now, written = [0.0], []

    class Trainer:
        global_step, max_steps, is_global_zero, loggers = 0, 10_000, True, []
        lightning_module = None
        strategy = type("", (), {"broadcast": staticmethod(lambda value: value)})

        def save_checkpoint(self, path, **_):
            now[0] += 6
            written.append(now[0])

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer, checkpoint = Trainer(), ResumableCheckpoint(tmp_path / "last.ckpt", 10.0)
    checkpoint.on_train_start(trainer, None)
    for trainer.global_step in range(1, 3001):
        now[0] += 1
        checkpoint.on_train_batch_end(trainer, None)
    assert written[0] == 16 and all(b - a == 300 for a, b in pairwise(written))
    assert 6 * len(written) / now[0] < 0.022


def test_labels_of_other_rows_another_target_or_another_tokenizer_are_refused(
    target, rows, tmp_path
):
    config = replace(TINY, labels=FeatureLabels())
    fit_head(target, rows, config, tmp_path)
    with pytest.raises(UserError, match="labels have another rows"):
        fit_head(target, (rows + 1) % 29, config, tmp_path)
    with pytest.raises(UserError, match="labels have another target"):
        fit_head(tiny_target(seed=5), rows, config, tmp_path)
    with pytest.raises(
        UserError, match="ids up to 31 for a target of 29: encode them with its tokenizer"
    ):
        fit_head(target, torch.where(rows == rows.max(), 31, rows), config, tmp_path)
