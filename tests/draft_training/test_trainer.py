"""What every training on rows shares: schedules, clipping and settings."""

import doctest
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch

import nde_talf.draft_training.training.trainer
from nde_talf.decoding.common import progress
from nde_talf.draft_training.training.head_training import HeadModule, build_head, fit_head
from nde_talf.draft_training.training.trainer import warm_up_then_cosine
from tests.draft_training.heads import same
from tests.draft_training.test_training import TINY


def test_the_examples_of_the_schedules():
    assert doctest.testmod(nde_talf.draft_training.training.trainer) == (0, 2)


class Line(pl.Callback):
    def on_train_batch_end(self, *_):
        self.line = progress._activities[-1].line()


def test_a_line_says_step_loss_speed_and_time_to_go(target, rows, tmp_path):
    fit_head(target, rows, TINY, tmp_path, callbacks=[seen := Line()])
    for words in ("5 of 6 steps", "to go", "loss ", "tokens_per_second "):
        assert words in seen.line


def test_gradients_are_clipped_to_the_norm_that_is_asked_for(target, rows, tmp_path, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def watched(self, *args, **kwargs):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    free = fit_head(target, rows, replace(TINY, gradient_clip=None), tmp_path / "free")
    largest = max(norms)
    norms.clear()
    config = replace(TINY, gradient_clip=0.5 * largest)
    clipped = fit_head(target, rows, config, tmp_path / "clipped")
    assert max(norms) == pytest.approx(0.5 * largest, rel=1e-4)
    assert not same(free, clipped)


def test_the_learning_rate_rises_again_where_trees_begin(target):
    module = HeadModule(build_head(target, TINY), replace(TINY, steps=20, chain_fraction=0.5))
    before, *rising, after = map(module.learning_rate_fraction, (9, 10, 11, 12))
    whole = [warm_up_then_cosine(step, 20, 2) for step in (10, 11)]
    assert rising == [0.5 * whole[0], whole[1]] and before > rising[0] and after < whole[1]
