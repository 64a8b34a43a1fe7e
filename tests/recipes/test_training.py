"""Training in legs: ended, killed, paused and annealed, it is the training that it would have been."""

import json
import shutil
import threading
import time

import pytest
import torch

from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.training.checkpoint import CHECKPOINT
from nde_talf.draft_training.training.lm_training import build_llama
from nde_talf.draft_training.training.trainer import train_rows
from nde_talf.pipelines.stages.answers import OPENING
from recipes.small.steps import samples
from recipes.small.training import Leg, RecipeConfig, RecipeModel, reached, weights

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


def test_all_held_out_rows_count_alike():
    """Also those of the last pass, which has fewer."""
    module, many = RecipeModel(settings(), VOCABULARY), rows().repeat(2, 1)
    assert module.figures(many)["nats"] == pytest.approx(module.loss(many)[0].item())


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


@pytest.mark.slow
def test_a_decay_begins_from_a_copy_and_leaves_the_stable_phase_as_it_is(tmp_path):
    """The stable phase goes on as if there had been none."""
    stable, anneal = tmp_path / "stable", tmp_path / "anneal"
    train(stable, settings(), hours=0)
    shutil.copytree(stable, anneal)
    annealed = train(anneal, settings(decay_from=1))
    with pytest.raises(UserError):
        train(anneal, settings(decay_from=1, steps=9))
    longer, whole = (train(folder, settings()) for folder in (stable, tmp_path / "whole"))
    assert equal(longer, whole) and not equal(annealed, whole)
    assert equal(weights(stable / CHECKPOINT, settings(), VOCABULARY), whole)


@pytest.mark.slow
def test_a_paused_training_waits_and_goes_on(tmp_path):
    """Its state is on disk meanwhile, and the time isn't counted."""
    pause, state = tmp_path / "pause", tmp_path / "paused"
    pause.touch()
    paused = state, settings(steps=2), 0.02  # hours: an upper limit of the pause
    thread = threading.Thread(target=train, args=paused, daemon=True)
    thread.start()
    limit = time.time() + 60
    while not (state / CHECKPOINT).exists() and time.time() < limit:
        time.sleep(0.05)
    assert reached(state / CHECKPOINT) == 0
    assert not (state / "held_out.jsonl").exists()
    pause.unlink()
    thread.join(60)
    assert sorted(curve(state)) == [1, 2]


def test_the_targets_own_texts_are_written_once(tmp_path, monkeypatch):
    """They fill rows of the same length, and are read when they are there."""

    target, texts = tmp_path / "target", tmp_path / "texts"
    build_llama(settings(max_length=48), VOCABULARY).save_pretrained(target)
    prefixes = torch.arange(192).view(4, 48).remainder(VOCABULARY).to(torch.int16)
    written = samples(target, texts, prefixes, 4)
    assert written.dtype == torch.int16 and written.shape[1] == 48
    assert torch.equal(written[0, 1 : 1 + OPENING], prefixes[0, :OPENING])
    monkeypatch.delattr("recipes.small.steps.TransformersEngine.sample")
    assert torch.equal(samples(target, texts, prefixes, 4), written)
