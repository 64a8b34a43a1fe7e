"""The steps of the recipe, by its command."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nde_talf.data.text.shipped import SHIPPED
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.training.lm_training import build_llama
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.runs.lock import locked
from recipes.small.steps import SmallConfig, run
from recipes.small.text import Text
from recipes.small.training import RecipeConfig
from tests import ROOT


@pytest.mark.parametrize(
    ("step", "first"),
    [("anneal", "step=train"), ("draft", "step=anneal"), ("head", "step=anneal")],
)
def test_steps_say_what_comes_before_them(step, first, tmp_path, monkeypatch):
    """Without a state there is nothing to decay, and without a target nothing to distil."""
    monkeypatch.setattr("recipes.small.steps.prepared", None)  # it is told before
    config = SmallConfig(step=step, state=str(tmp_path))
    with pytest.raises(UserError, match=f"run {first} first"):
        run(config)
    with locked(tmp_path), pytest.raises(UserError, match="is in use"):
        run(config)


def test_weights_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    target = SHIPPED / "pair" / "target"
    tokenizer = load_tokenizer(target)
    tokenizer.add_tokens("another")
    monkeypatch.setattr("recipes.small.steps.prepared", lambda *_: Text(tokenizer, None, {}, {}))
    with pytest.raises(UserError, match="knows other tokens"):
        run(SmallConfig(step="train", state=str(tmp_path), weights=str(target)))


@pytest.mark.slow
def test_a_head_learns_the_rows_of_the_draft(tmp_path, monkeypatch):
    """It is exported for the newest annealed target, with weights that it can begin with."""
    target = RecipeConfig(hidden=16, layers=2, heads=2, intermediate=16, max_length=12)
    build_llama(target, 40).save_pretrained(tmp_path / "anneal-1" / "target")
    rows = (torch.arange(144).view(12, 12) * 7 % 40).to(torch.int16)
    text = Text(None, rows, {"code": rows[:4]}, {"code": 3.0})
    monkeypatch.setattr("recipes.small.steps.prepared", lambda *_: text)
    monkeypatch.setattr("recipes.small.steps.HEAD_STEPS", 2)
    judged = []
    monkeypatch.setattr(
        "nde_talf.pipelines.stages.draft.held_out_report",
        lambda *given: judged.append(given[2]) or {},
    )
    asked = ("step=head", f"state={tmp_path}", "samples=0", "batch=2", "tracking=disabled")
    config = composed(SmallConfig, *asked, config="small")
    run(config)
    run(config)
    assert len([*tmp_path.glob("anneal-1/head/curves/**/metrics.csv")]) == 2  # one a leg
    assert torch.equal(judged[0].tokens, rows[2:3, :8])  # rows 0 and 2 are held out; 0 chose
    export = tmp_path / "anneal-1" / "head" / "export"
    model = CausalModel.load(str(tmp_path / "anneal-1" / "target"))
    first = load_head(export, model)
    (tmp_path / "anneal-1" / "head").rename(tmp_path / "before")
    monkeypatch.setattr("recipes.small.steps.HEAD_STEPS", 1)
    run(replace(config, weights=str(tmp_path / "before" / "export")))
    second = load_head(export, model)
    assert not torch.equal(first.fc.weight, second.fc.weight)


@pytest.mark.long
@pytest.mark.parametrize(
    ("argument", "words"), [("--help", "step=head"), ("step=anneal", "run step=train first")]
)
def test_the_command_tells_its_steps(argument, words, tmp_path):
    """In its help, and where the one before is missing."""
    command = [sys.executable, "-m", "recipes.small", argument, f"state={tmp_path}"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert words in " ".join(told.stdout.split()) and "Traceback" not in told.stderr
