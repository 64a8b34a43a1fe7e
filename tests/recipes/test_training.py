"""A training in legs is the training that it would have been in one."""

import json

import pytest
import torch

from nde_talf.draft_training.training.checkpoint import CHECKPOINT
from nde_talf.draft_training.training.trainer import train_rows
from recipes.small.training import Leg, RecipeConfig, RecipeModel, reached

VOCABULARY = 40


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Compiling takes longer than these trainings."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


def settings(**changed):
    """A tiny model of the recipe."""
    shape = {"hidden": 16, "layers": 2, "heads": 2, "intermediate": 16, "max_length": 8}
    return RecipeConfig(**shape | {"batch": 2, "warm_up": 2, "steps": 8} | changed)


def rows():
    """Twelve rows of a pattern."""
    return (torch.arange(96).view(12, 8) * 7 % VOCABULARY).to(torch.int16)


def train(folder, config, hours=1.0, **options):
    """One leg in `folder`."""
    held_out, pause = {"code": rows()[:2]}, folder.parent / "pause"
    leg = Leg(folder, pause, hours, 0, held_out, lambda nats: nats)
    module = RecipeModel(config, VOCABULARY, **options)
    train_rows(module, rows(), folder, callbacks=[leg])
    return None if leg.ended else module.model.eval().cpu()


def curve(folder):
    """The losses on held-out rows by step."""
    lines = map(json.loads, (folder / "held_out.jsonl").read_text().splitlines())
    return {line["step"]: line["code/nats"] for line in lines}


def equal(one, other):
    """Whether two models have the same weights."""
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.slow
def test_a_leg_that_ended_is_gone_on_with_to_the_same_weights(tmp_path):
    """Two legs of one step each, then the rest, against one training."""
    legs, whole = tmp_path / "legs", tmp_path / "whole"
    trained = train(whole, settings())
    for step in (1, 2):
        assert train(legs, settings(), hours=0) is None
        assert reached(legs / CHECKPOINT) == step
    assert equal(train(legs, settings()), trained)
    assert curve(legs) == curve(whole)
