"""How a head is trained: on Algorithm 1's loss, from an older one, in parts, in several processes,
past bad steps, and resumed exactly.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
import pytorch_lightning as pl
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.target_trees import target_beam
from nde_talf.draft_training.training.head_evaluation import held_out_report
from nde_talf.draft_training.training.head_training import HeadModule, build_head, fit_head
from nde_talf.draft_training.training.losses import HeadReadout
from nde_talf.draft_training.training.trainer import BEST, CHECKPOINT
from nde_talf.draft_training.training_settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from tests import ROOT
from tests.draft_training.heads import (
    KillBefore,
    batch_of,
    predictable_rows,
    random_head,
    same,
    tiny_target,
    written_out,
)
from tests.refusal import refusal

# Weights are compared to 1e-4, so the precision is not the machine's choice.
TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=3),
    roots=0,
    chain_fraction=0.0,
    steps=6,
    batch=4,
    warm_up=2,
    checkpoint_seconds=0,
    precision="32-true",
)


def close(one, two, to=1e-4):
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=to, rtol=to) for a, b in pairs)


def test_all_roots_and_no_chain_steps_is_the_loss_of_algorithm_1(target, rows):
    head, tokens = random_head(target), rows[:2, :6]
    loss, _ = HeadModule(head, TINY).loss(batch_of(tokens), 0)
    trees = target_beam(target, tokens, 2, 3, torch.arange(1, 6), None)
    outputs = tree_features(head, tokens, trees.features, trees.roots, trees.levels)
    outputs[0] = outputs[0][:, :, None]
    labels = [trees.features[:, 1:, None], *trees.labels]
    readout = HeadReadout(target.lm_head.weight)
    nodes = [
        [x[:, :4].flatten(0, 2) for x in pair]  # the last root's prediction is outside
        for pair in zip(outputs, labels, strict=True)
    ]
    nodes = [written_out(*x, readout, torch.ones(len(x[0])), TalfLoss()).total for x in nodes]
    torch.testing.assert_close(loss, sum(nodes) / 8)


@pytest.mark.long
@pytest.mark.parametrize("loss", [TalfLoss, HassLoss, EagleLoss])
def test_every_loss_trains_and_touches_nothing_but_the_head(target, rows, tmp_path, loss):
    frozen = {name: weight.clone() for name, weight in target.module.state_dict().items()}
    config = replace(TINY, loss=loss(), steps=40, roots=4)
    trained, fresh = fit_head(target, rows, config, tmp_path), build_head(target, config).eval()
    before, after = (
        held_out_report(head, target, TokenRows.plain(rows), k=2) for head in (fresh, trained)
    )
    assert after["kl"][0] < 0.8 * before["kl"][0] and after["overlap"][0] > before["overlap"][0]
    assert loss == "eagle" or after["kl"][2] < before["kl"][2]
    for name, weight in target.module.state_dict().items():
        assert torch.equal(weight, frozen[name])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_killed_run_resumes_to_the_weights_of_an_undisturbed_one(
    target, rows, tmp_path, optimizer
):
    config = replace(TINY, optimizer=optimizer, chain_fraction=0.5, roots=3)
    whole = fit_head(target, rows, config, tmp_path / "whole")
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, config, tmp_path / "killed", callbacks=[KillBefore(4)])
    for _ in range(2):  # resumed, then finished
        assert same(fit_head(target, rows, config, tmp_path / "killed"), whole)
    saved = torch.load(tmp_path / "killed" / CHECKPOINT, weights_only=True)["state_dict"]
    assert sorted(saved) == sorted(f"head.{name}" for name in whole.state_dict())


def test_an_unfinished_training_takes_no_other_settings(target, rows, tmp_path):
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, TINY, tmp_path, callbacks=[KillBefore(3)])
    with refusal(r"other settings than those of now \(warm_up, loss\)"):
        fit_head(target, rows, replace(TINY, warm_up=3, loss=TalfLoss(k=3)), tmp_path)


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
        weights = [weight.detach().clone() for weight in pl_module.head.parameters()]
        self.after[trainer.global_step] = weights


@pytest.mark.slow
def test_a_bad_step_moves_nothing_and_the_training_goes_on(target, rows, tmp_path, broken, capsys):
    config, seen = replace(TINY, gradient_clip=1.0), Weights()
    broken |= {2, 4}
    head = fit_head(target, rows, config, tmp_path / "one", callbacks=[seen])
    for step in range(1, 6):
        pairs = zip(seen.after[step], seen.after[step + 1], strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs) == (step not in broken)
    assert "step 2: passed over, 1 of at most 10" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, config, tmp_path / "killed", callbacks=[KillBefore(3)])
    assert same(fit_head(target, rows, config, tmp_path / "killed"), head)


class Spoil(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == 3:
            with torch.no_grad():
                pl_module.head.fc.weight[0, 0] = float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
def test_a_training_that_diverges_stops_and_keeps_its_last_good_checkpoint(
    target, rows, tmp_path, broken, weights
):
    broken |= set() if weights else set(range(3, 30))
    callbacks = [Spoil()] if weights else []
    with refusal(r"after 10 such steps.*diverged|not finite"):
        fit_head(target, rows, replace(TINY, steps=20), tmp_path, callbacks=callbacks)
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert saved["global_step"] == 3
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


@pytest.mark.slow
def test_the_head_is_that_of_the_best_evaluation(target, rows, tmp_path):
    """At a rate at which it gets worse again, also after a kill in an evaluation."""
    config = replace(TINY, steps=8, batch=2, evaluate_every=2, lr_muon=0.3, lr_adam=0.3)
    held_out, losses = predictable_rows(target, 12, 30)[24:], {}

    class Losses(pl.Callback):
        def on_validation_end(self, trainer, *_):
            losses[trainer.global_step] = float(trainer.callback_metrics["held_out_loss"])
            if trainer.global_step == killed:
                raise ProcessLookupError

    how, killed = {"held_out": held_out}, 4
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, config, tmp_path, callbacks=[Losses()], **how)
    killed = None
    head = fit_head(target, rows, config, tmp_path, callbacks=[Losses()], **how)
    assert list(losses) == [2, 4, 6, 8] and len(set(losses.values())) == 4
    best = min(losses, key=losses.get)
    assert torch.load(tmp_path / BEST, weights_only=True)["global_step"] == best
    assert same(head, fit_head(target, rows, config, tmp_path, **how))  # finished: the same best


class Listening(pl.Callback):
    """Writes where each process of a training listens, and the loss that it logs."""

    def __init__(self, file):
        self.file = file

    def on_train_batch_end(self, trainer, *_):
        loss = str(float(trainer.logged_metrics["loss"]))
        open_ = psutil.Process().net_connections("inet")
        hosts = {each.laddr.ip for each in open_ if each.status == psutil.CONN_LISTEN}
        with self.file.open("a") as stream:
            stream.write(" ".join([str(os.getpid()), loss, *hosts]) + "\n")


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_passes_and_processes_share_the_rows_of_a_step(target, rows, tmp_path, optimizer):
    config, rows = replace(TINY, optimizer=optimizer), TokenRows.plain(rows)
    rows.loss[::3, 4:] = False  # so that passes differ in what counts
    alone = Listening(tmp_path / "alone")
    whole = fit_head(target, rows, config, tmp_path / "whole", callbacks=[alone])
    losses = sorted(float(line.split()[1]) for line in alone.file.open())
    half = replace(config, batch=2)
    assert not close(whole, fit_head(target, rows, half, tmp_path / "half"))
    ways = {"parts": {"accumulate": 2}}
    if optimizer == "muon":  # new processes take their time
        ways["of two"] = {"devices": 2}
    for name, how in ways.items():
        seen = Listening(tmp_path / f"{name}.listening")
        head = fit_head(target, rows, replace(half, **how), tmp_path / name, callbacks=[seen])
        assert close(whole, head)
        listening = [*map(str.split, seen.file.open())]
        processes = how.get("devices", 1)
        assert len({process for process, *_ in listening}) == processes
        logged = sorted(float(each[1]) for each in listening)[::processes]
        assert logged == pytest.approx(losses, rel=1e-4)
        hosts = {host.removeprefix("::ffff:") for _, _, *own in listening for host in own}
        assert hosts <= {"127.0.0.1", "::1"}
        assert not list((tmp_path / name).glob(".*")), "the file that processes meet in"


IN_TWO = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.draft_training.heads import predictable_rows, tiny_target
from tests.draft_training.test_training import TINY, fit_head
target, endless = tiny_target(), replace(TINY, steps=1_000_000, batch=2, devices=2)
fit_head(target, predictable_rows(target, 12), endless, Path(sys.argv[1]))
"""


@pytest.mark.long
def test_no_process_outlives_a_killed_training(tmp_path):
    command = [sys.executable, "-c", IN_TWO, str(tmp_path)]
    training = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (tmp_path / CHECKPOINT).exists():
        assert training.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    others = training.children()
    assert len(others) >= 2
    training.kill()
    training.wait()
    while any(map(lives, others)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def lives(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_rows_without_anything_to_learn_are_passed_over(target, rows, tmp_path):
    some = TokenRows(rows, torch.zeros_like(rows).bool(), torch.zeros_like(rows))
    for nothing in (some, rows[:0]):
        with refusal("assistant's turn"):
            fit_head(target, nothing, TINY, tmp_path)
    some.loss[:8] = True
    one = fit_head(target, some, TINY, tmp_path / "some")
    assert close(one, fit_head(target, rows[:8].short(), TINY, tmp_path / "those"))


def test_rows_that_do_not_fit_and_devices_that_are_not_there_are_refused(target, rows, tmp_path):
    for other in (rows + target.vocab_size, -rows):
        with refusal("encode them with its tokenizer"):
            fit_head(target, other, TINY, tmp_path)
    with refusal(r"too short for draft.loss.depth=3"):
        fit_head(target, rows[:, :4], TINY, tmp_path)
    with refusal("no held-out rows"):
        fit_head(target, rows, replace(TINY, evaluate_every=2), tmp_path)
    elsewhere = tiny_target()
    elsewhere.device = torch.device("cuda", torch.cuda.device_count())
    with refusal(r"draft\.devices=99"):
        fit_head(elsewhere, rows, replace(TINY, devices=99), tmp_path)
