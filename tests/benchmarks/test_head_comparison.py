"""Figures of the comparison of heads: by hand."""

import numpy as np
import pytest

from benchmarks.head_comparison import (
    comparison_table,
    gain,
    generation_length,
    rank_figure,
    rank_table,
)
from benchmarks.papers.talf import calibration_error
from nde_talf.evaluation.benchmark import Record


def record(method: str, prompt: int, tokens: int, steps: int, setting: str = "T=0") -> Record:
    return Record(setting, method, str(prompt), "text", tokens, steps, 60 * steps, 1.0)


def test_the_generation_length_is_all_tokens_over_all_passes():
    value, low, high = generation_length(
        [record("a", 0, 10, 5), record("a", 1, 30, 5), record("a", 2, 8, 0)]
    )
    assert value == 4.0 and low == pytest.approx(2.0) and high == pytest.approx(6.0)


def test_a_gain_pairs_prompts():
    ours = [record("a", i, (i + 1) * 11, i + 1) for i in range(5)]
    theirs = [record("b", i, (i + 1) * 10, i + 1) for i in (4, 3, 2, 1, 0)]
    assert gain(ours, theirs) == pytest.approx([1.1, 1.1, 1.1])


def test_calibration_error_by_hand():
    confidence, correct = np.array([0.10, 0.05, 0.90, 0.95]), np.array([0.0, 1.0, 1.0, 1.0])
    expected = (abs(1 - 0.15) + abs(2 - 1.85)) / 4  # two bins are in use, [0, 1/2) and [1/2, 1]
    assert calibration_error(confidence, correct, bins=2) == pytest.approx(expected)
    even = np.repeat(np.linspace(0.05, 0.95, 10), 100)
    rng = np.random.default_rng(0)
    assert calibration_error(even, (rng.random(1000) < even).astype(float)) < 0.06
    assert calibration_error(even, np.ones(1000)) == pytest.approx(0.5)


def test_the_tables_name_every_tree_and_head_and_none_has_a_gain_over_itself():
    tokens = {"old": 20, "new": 25}
    records = [
        record(f"{head} / {tree}", i, n, 10)
        for head, n in tokens.items()
        for tree in "xy"
        for i in (0, 1)
    ]
    table = comparison_table(
        records, {"old": "Old", "new": "New"}, ["x", "y"], ["old", "new"], {"T=0": "temperature 0"}
    )
    lines = table.splitlines()
    assert (
        len(lines) == 6 and lines[0] == "| tree | loss | τ, temperature 0 | over Old | over New |"
    )
    assert lines[2] == "| x | Old | 2.00 [2.00, 2.00] |  | -20.0 % [-20.0, -20.0] |"
    assert lines[3] == "| x | New | 2.50 [2.50, 2.50] | +25.0 % [+25.0, +25.0] |  |"
    ranks = {
        "Old": {"accuracy": [0.5, 0.25], "ece": [0.1, 0.2]},
        "New": {"accuracy": [0.75, 0.5], "ece": [0.0, 0.125]},
    }
    assert "| New | 0.750 | 0.500 | 0.000 | 0.125 |" in rank_table(ranks)
    accuracy = rank_figure(ranks).axes[0]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[0.5, 0.25], [0.75, 0.5]]
