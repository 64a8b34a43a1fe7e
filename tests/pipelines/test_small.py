"""The recipe's command, and the name of the shipped pair."""

from dataclasses import replace

import pytest
import torch

from nde_talf.data.text.pair import shipped_pair
from nde_talf.data.text.recipe import Text
from nde_talf.data.text.shipped import SHIPPED, shipped
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import load_head
from nde_talf.draft_training.recipe import RecipeConfig
from nde_talf.draft_training.train_lm import build_llama
from nde_talf.pipelines.cli import composed
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.generate import GenerateConfig, generate
from nde_talf.pipelines.lock import locked
from nde_talf.pipelines.pair import _read
from nde_talf.pipelines.small import SmallConfig, run
from nde_talf.pipelines.streaming import table_here
from nde_talf.selector.latency import LatencyTable
from tests.draft_training.heads import tiny_target


def test_a_missing_part_of_the_shipped_pair_is_named(tmp_path):
    """With what to do about it."""
    with pytest.raises(UserError, match=r"target: this part of the shipped pair is missing; take"):
        shipped("target", tmp_path)


def test_a_draft_for_the_shipped_target_learns_rows_of_one_length(tmp_path, monkeypatch):
    monkeypatch.setattr("nde_talf.pipelines.answers.sampled", lambda *_: [[1] * 600] * 9)
    config = composed(Config, "model=small", "model.draft=distil", "model.length=256")
    assert _read(config, tmp_path, [tiny_target()], 512).for_draft.shape[1] == 512


@pytest.mark.parametrize(
    ("step", "first"),
    [("anneal", "step=train"), ("draft", "step=anneal"), ("head", "step=anneal")],
)
def test_steps_say_what_comes_before_them(step, first, tmp_path, monkeypatch):
    """Without a state there is nothing to decay, and without a target nothing to distil."""
    monkeypatch.setattr("nde_talf.pipelines.small.prepared", None)  # it is told before
    config = SmallConfig(step=step, state=str(tmp_path))
    with pytest.raises(UserError, match=f"run {first} first"):
        run(config)
    with locked(tmp_path), pytest.raises(UserError, match="is in use"):
        run(config)


def test_weights_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    target = SHIPPED / "pair" / "target"
    tokenizer = load_tokenizer(target)
    tokenizer.add_tokens("another")
    monkeypatch.setattr(
        "nde_talf.pipelines.small.prepared", lambda *_: Text(tokenizer, None, {}, {})
    )
    with pytest.raises(UserError, match="knows other tokens"):
        run(SmallConfig(step="train", state=str(tmp_path), weights=str(target)))


@pytest.mark.slow
def test_a_head_learns_the_rows_of_the_draft(tmp_path, monkeypatch):
    """It is exported for the newest annealed target, with weights that it can begin with."""
    target = RecipeConfig(hidden=16, layers=2, heads=2, intermediate=16, max_length=12)
    build_llama(target, 40).save_pretrained(tmp_path / "anneal-1" / "target")
    rows = (torch.arange(144).view(12, 12) * 7 % 40).to(torch.int16)
    text = Text(None, rows, {"code": rows[:4]}, {"code": 3.0})
    monkeypatch.setattr("nde_talf.pipelines.small.prepared", lambda *_: text)
    monkeypatch.setattr("nde_talf.pipelines.small.HEAD_STEPS", 2)
    judged = []
    monkeypatch.setattr(
        "nde_talf.pipelines.draft.held_out_report", lambda *given: judged.append(given[2]) or {}
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
    monkeypatch.setattr("nde_talf.pipelines.small.HEAD_STEPS", 1)
    run(replace(config, weights=str(tmp_path / "before" / "export")))
    second = load_head(export, model)
    assert not torch.equal(first.fc.weight, second.fc.weight)


@pytest.mark.slow
def test_the_first_minute(tmp_path, monkeypatch, capsys, quick_prices):
    """From any folder, without a run: a text, what decoded it, and how much faster it was."""
    monkeypatch.chdir(tmp_path)
    generate(GenerateConfig(prompt="def main(", new_tokens=12))
    printed = capsys.readouterr().out
    assert printed.startswith("def main(")
    for words in ("NDE selector, trees (K, L1, L2)", "rule traversal; T = 0.6", "times as fast as"):
        assert words in printed
    monkeypatch.delattr("nde_talf.data.text.pair.Pair.models")  # no draft model is loaded
    generate(GenerateConfig(seed=1, new_tokens=4, compare=False, drafter="head"))
    printed = capsys.readouterr().out
    assert "drafter head" in printed and "times as fast" not in printed


@pytest.mark.long
def test_a_table_of_another_machine_is_measured_once(quick_prices, tmp_path, monkeypatch):
    """And kept in the user's cache if it is quiet; that of this machine is taken as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pair = shipped_pair()
    elsewhere = replace(
        LatencyTable.load(SHIPPED / "latency/table.json"), machine={"device": "another"}
    )
    here = *pair.models("cpu", "float32"), pair.rows("held_out")[0].tolist()
    with monkeypatch.context() as noisy:
        noisy.setattr("nde_talf.selector.latency.AGREE", 0)
        table_here(elsewhere, *here)
    assert not [*tmp_path.rglob("latency-*.json")]
    measured = table_here(elsewhere, *here)
    assert measured.machine != elsewhere.machine
    assert measured.verify.keys() == elsewhere.verify.keys()
    assert table_here(elsewhere, *here) == measured
    assert table_here(measured, *here) is measured
