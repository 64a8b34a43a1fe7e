"""A small language model is trained, and another distilled from it; rows come in order."""

import math
from dataclasses import replace

import pytest
import torch

from nde_talf import CausalModel
from nde_talf.draft_training.training.lm_training import (
    LanguageModel,
    build_llama,
    fit,
    held_out_report,
)
from nde_talf.draft_training.training.trainer import Position, RowBatches
from tests.draft_training.test_checkpoint import TINY as ONE_LAYER
from tests.draft_training.test_training import close

VOCABULARY = 24
TINY = replace(ONE_LAYER, layers=2, max_length=64, steps=40, batch=4, precision="32-true")


@pytest.mark.slow
def test_distillation_brings_the_draft_closer_to_the_target(tmp_path, monkeypatch):
    """On rows that can be predicted: each token is the one before it plus one or two."""
    steps = torch.randint(1, 3, (40, 16), generator=torch.Generator().manual_seed(0))
    rows, distilled = steps.cumsum(1) % VOCABULARY, replace(TINY, layers=1, seed=1)
    models = []
    for config in (TINY, distilled):
        module = LanguageModel(build_llama(config, VOCABULARY), config, *models)
        models.append(fit(module, rows, tmp_path / str(config.seed)))
    target, fresh = (
        CausalModel(model) for model in (models[0], build_llama(distilled, VOCABULARY))
    )
    before = held_out_report(target, fresh, rows)
    after = held_out_report(target, CausalModel(models[1]), rows)
    for temperature in (1.0, 0.6):
        assert after["overlap"][temperature] > before["overlap"][temperature] + 0.2
    assert after["greedy_agreement"] > before["greedy_agreement"]
    monkeypatch.setattr("nde_talf.draft_training.training.lm_training.LOGITS", 1)  # a row at a time
    module = LanguageModel(build_llama(distilled, VOCABULARY), distilled, models[0])
    assert close(fit(module, rows, tmp_path / "parts"), models[1])
    monkeypatch.setattr("nde_talf.draft_training.training.lm_training.NUMBERS", 7 * VOCABULARY)
    in_parts = held_out_report(target, fresh, rows)
    assert in_parts["overlap"] == pytest.approx(before["overlap"])
    for name in ("target_nats", "draft_nats", "greedy_agreement", "positions"):
        assert in_parts[name] == pytest.approx(before[name])
    short = CausalModel(build_llama(distilled, VOCABULARY - 1))  # it has no row for a token
    short.match(VOCABULARY)
    assert held_out_report(target, short, rows)["draft_nats"] < math.inf


def test_every_row_is_seen_once_before_any_is_seen_again():
    numbered = torch.arange(10)[:, None]
    batches = RowBatches(numbered, batch=4, steps=5, seed=0)
    seen = torch.cat(list(batches)).flatten().tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    later = RowBatches(numbered, batch=4, steps=5, seed=0, at=Position(3))
    assert torch.cat(list(later)).flatten().tolist() == seen[12:]
