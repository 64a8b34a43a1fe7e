"""With `ema_decay` a training ends with the average of its weights, also after a kill, and copies
no target for it.
"""

from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch

from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.settings import HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import fit_head
from nde_talf.draft_training.trainer import CHECKPOINT, AveragedWeights
from tests.draft_training.heads import KillBefore, same

DECAY = 0.7
TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=2),
    roots=2,
    steps=6,
    batch=2,
    warm_up=2,
    checkpoint_seconds=0,
    ema_decay=DECAY,
)


class Watch(pl.Callback):
    """Keeps the weights after every step, and looks for copies of the target."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen.append([weight.detach().clone() for weight in pl_module.head.parameters()])
        (average,) = (
            callback for callback in trainer.callbacks if isinstance(callback, AveragedWeights)
        )
        copy = average._average_model.module
        assert copy.models[0] is pl_module.models[0]
        assert (
            copy.head.target is pl_module.head.target
            and copy.source.target is pl_module.head.target
        )


@pytest.mark.parametrize("features", ["final", "three"])
def test_the_weights_are_the_average_of_the_steps(target, rows, tmp_path, features):
    watch = Watch()
    head = fit_head(target, rows, replace(TINY, features=features), tmp_path, callbacks=[watch])
    average = watch.seen[0]
    for weights in watch.seen[1:]:
        average = [
            DECAY * old + (1 - DECAY) * new for old, new in zip(average, weights, strict=True)
        ]
    for mine, reference, last in zip(head.parameters(), average, watch.seen[-1], strict=True):
        torch.testing.assert_close(mine, reference)
        assert not torch.equal(mine, last)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_killed_run_ends_with_the_average_of_an_undisturbed_one(
    target, rows, tmp_path, optimizer
):
    config = replace(TINY, optimizer=optimizer)
    whole = fit_head(target, rows, config, tmp_path / "whole")
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, config, tmp_path / "killed", callbacks=[KillBefore(4)])
    for _ in range(2):  # resumed, then finished
        assert same(whole, fit_head(target, rows, config, tmp_path / "killed"))
    saved = torch.load(tmp_path / "killed" / CHECKPOINT, weights_only=True)
    names = {f"head.{name}" for name in whole.state_dict()}
    assert set(saved["state_dict"]) == set(saved["current_model_state"]) == names


@pytest.mark.slow
def test_two_spawned_processes_end_with_the_average_of_one(target, rows, tmp_path):
    config = replace(TINY, roots=0, chain_fraction=0.0, precision="32-true")
    one = fit_head(target, rows, replace(config, batch=4), tmp_path / "one")
    two = fit_head(target, rows, replace(config, devices=2, strategy="ddp_spawn"), tmp_path / "two")
    for mine, reference in zip(two.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-4)


def test_a_decay_that_averages_nothing_is_refused():
    for decay in (-0.1, 1.0):
        with pytest.raises(UserError, match="ema_decay"):
            replace(TINY, ema_decay=decay)
    with pytest.raises(UserError, match="fsdp"):
        replace(TINY, optimizer="adamw", strategy="fsdp")
