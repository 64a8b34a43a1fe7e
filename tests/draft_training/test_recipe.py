"""Training in legs: ended, killed, paused and annealed, it is the training that it would have been."""

import json
import shutil
import threading
import time

import pytest
import torch

from nde_talf.draft_training.checkpoint import CHECKPOINT
from nde_talf.draft_training.recipe import OPENING, Leg, RecipeConfig, RecipeModel, reached, weights
from nde_talf.draft_training.train_lm import build_llama
from nde_talf.draft_training.trainer import train_rows
from nde_talf.pipelines.small import samples

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
    """Three legs of one step each, then the rest, against one training."""
    whole = train(tmp_path / "whole", settings())
    for step in (1, 2, 3):
        assert train(tmp_path / "legs", settings(), hours=0) is None
        assert reached(tmp_path / "legs" / CHECKPOINT) == step
    assert equal(train(tmp_path / "legs", settings()), whole)
    assert curve(tmp_path / "legs") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_a_decay_begins_from_a_copy_and_leaves_the_stable_phase_as_it_is(tmp_path):
    """The stable phase goes on as if there had been none."""
    train(tmp_path / "stable", settings(), hours=0)
    (tmp_path / "anneal").mkdir()
    shutil.copy(tmp_path / "stable" / CHECKPOINT, tmp_path / "anneal")
    annealed = train(tmp_path / "anneal", settings(decay_from=1))
    longer, whole = (train(tmp_path / name, settings()) for name in ("stable", "whole"))
    assert equal(longer, whole) and not equal(annealed, whole)
    assert equal(weights(tmp_path / "stable" / CHECKPOINT, settings(), VOCABULARY), whole)


@pytest.mark.slow
def test_a_paused_training_waits_and_goes_on(tmp_path):
    """Its state is on disk meanwhile, and the time isn't counted."""
    pause = tmp_path / "pause"
    pause.touch()
    paused = tmp_path / "paused", settings(steps=2), 0.02  # hours: an upper limit of the pause
    thread = threading.Thread(target=train, args=paused, daemon=True)
    thread.start()
    limit = time.time() + 60
    while not (tmp_path / "paused" / CHECKPOINT).exists() and time.time() < limit:
        time.sleep(0.05)
    assert reached(tmp_path / "paused" / CHECKPOINT) == 0
    assert not (tmp_path / "paused" / "held_out.jsonl").exists()
    pause.unlink()
    thread.join(60)
    assert not thread.is_alive()
    assert sorted(curve(tmp_path / "paused")) == [1, 2]


def test_the_targets_own_texts_are_written_once(tmp_path, monkeypatch):
    """They fill rows of the same length, and are read when they are there."""

    monkeypatch.setattr("nde_talf.pipelines.pair.AT_ONCE", 2)
    build_llama(settings(max_length=48), VOCABULARY).save_pretrained(tmp_path / "target")
    prefixes = torch.arange(4 * 48).view(4, 48).remainder(VOCABULARY).to(torch.int16)
    written = samples(tmp_path / "target", tmp_path / "texts", prefixes, 4)
    assert written.dtype == torch.int16 and written.shape[1] == 48 and 0 < len(written) <= 4
    assert torch.equal(written[0, 1 : 1 + OPENING], prefixes[0, :OPENING])
    monkeypatch.delattr("nde_talf.pipelines.pair.TransformersEngine.sample")
    assert torch.equal(samples(tmp_path / "target", tmp_path / "texts", prefixes, 4), written)
