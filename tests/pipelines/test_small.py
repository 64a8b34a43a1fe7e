"""Commands with the shipped pair."""

import shutil

import pytest

from nde_talf.data.text.shipped import SHIPPED, SMOLLM2, shipped
from nde_talf.pipelines.commands.generate import GenerateConfig, generate
from nde_talf.pipelines.runs.decoder import choose_policy
from nde_talf.pipelines.runs.finished import Run
from nde_talf.selector.policy import NeuralPolicy


@pytest.mark.slow
def test_the_first_minute(tmp_path, monkeypatch, capsys):
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


@pytest.mark.slow
def test_what_ships_for_smollm2_is_used_and_n_grams_where_nothing_does(
    tmp_path, monkeypatch, capsys
):
    """With the small pair's target and parts in their place."""
    monkeypatch.setattr("nde_talf.pipelines.runs.finished.SHIPPED", tmp_path / "small")
    monkeypatch.setattr("nde_talf.pipelines.runs.finished.smollm2", lambda: shipped("target"))
    asked = {"run": SMOLLM2, "prompt": "def main(", "new_tokens": 4}
    generate(GenerateConfig(**asked))
    printed = capsys.readouterr().out
    assert "no head ships" in printed and "drafter ngram" in printed
    for part in ("draft", "selector"):
        shutil.copytree(SHIPPED / part, tmp_path / SMOLLM2 / part)
    generate(GenerateConfig(**asked, temperature=0.0))
    printed = capsys.readouterr().out
    assert "drafter head" in printed and "times as fast" not in printed
    policy, _ = choose_policy(GenerateConfig(**asked, drafter="head"), Run(SMOLLM2, ""))
    assert isinstance(policy, NeuralPolicy)
