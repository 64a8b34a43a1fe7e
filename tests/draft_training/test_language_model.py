from dataclasses import replace

import pytest
import torch

from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.lm_settings import LanguageModelConfig
from nde_talf.draft_training.train_lm import (
    LanguageModel,
    build_llama,
    fit,
    held_out_report,
)
from nde_talf.draft_training.trainer import Position, RowBatches

VOCABULARY = 24
TINY = LanguageModelConfig(
    hidden=16,
    layers=2,
    heads=2,
    intermediate=32,
    max_length=64,
    steps=12,
    batch=4,
    warm_up=2,
    checkpoint_seconds=0,
)


@pytest.fixture(scope="module")
def rows():
    """Rows that can be predicted: each token is the one before it plus one or two."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 3, (40, 16), generator=generator)
    return steps.cumsum(1) % VOCABULARY


@pytest.fixture(scope="module")
def target(rows, tmp_path_factory):
    return train(rows, replace(TINY, steps=40), tmp_path_factory.mktemp("target"))


def train(rows, config, folder, teacher=None, callbacks=()):
    module = LanguageModel(build_llama(config, VOCABULARY), config, teacher)
    return fit(module, rows, folder, callbacks=callbacks)


def report_of(target, draft, rows):
    return held_out_report(CausalModel(target), CausalModel(draft), rows)


def test_distillation_brings_the_draft_closer_to_the_target(rows, target, tmp_path):
    config = replace(TINY, layers=1, steps=40, seed=1)
    fresh = report_of(target, build_llama(config, VOCABULARY), rows)
    report = report_of(target, train(rows, config, tmp_path, target), rows)
    for temperature in (1.0, 0.6):
        assert report["overlap"][temperature] > fresh["overlap"][temperature] + 0.2
    assert report["greedy_agreement"] > fresh["greedy_agreement"]


def test_every_row_is_seen_once_before_any_is_seen_again(rows):
    numbered = torch.arange(10)[:, None]
    batches = RowBatches(numbered, batch=4, steps=5, seed=0)
    seen = torch.cat(list(batches)).flatten().tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    later = RowBatches(numbered, batch=4, steps=5, seed=0, at=Position(3))
    assert torch.cat(list(later)).flatten().tolist() == seen[12:]
