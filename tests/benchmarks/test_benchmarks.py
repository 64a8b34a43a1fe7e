"""The benchmarks of decoding run from their command lines on a tiny pair, and their figures are
what they say.
"""

import json
import re
import sys

import pytest

from benchmarks import decode, timing
from nde_talf.evaluation import methods
from nde_talf.evaluation.protocol import BASELINE, CONTROL

pytestmark = pytest.mark.slow


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    return tmp_path


def ran(main, results, name: str, monkeypatch, *arguments) -> list[dict]:
    """The rows that a benchmark wrote, by column."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    main()
    written = json.loads((results / f"{name}.json").read_text())
    return [dict(zip(written["columns"], row, strict=True)) for row in written["rows"]]


SMALL = "--prompts", 2, "--tuning", 1, "--new-tokens", 12


@pytest.fixture
def few(monkeypatch):
    """Fewer settings to try."""
    for grid in ("LOOKUPS", "SCHEDULES", "UNLABELLED_TREES"):
        monkeypatch.setattr(methods, grid, getattr(methods, grid)[-2:])


def kind(method: str) -> str:
    """A method's name without what was chosen for it."""
    return re.sub(r" \([^)]*\)", "", method)


def test_the_loop_beside_transformers(run, results, few, monkeypatch):
    rows = ran(decode.main, results, "decode", monkeypatch, "--run", run, *SMALL)
    names = {BASELINE, "n-gram", "Traversal", "Traversal, TALF head"}
    others = {"transformers plain", "transformers assisted", "transformers prompt lookup"}
    for setting in ("T=1", "T=0"):
        measured = {row["method"]: row for row in rows if row["setting"] == setting}
        assert {kind(name) for name in measured} == names | others and CONTROL in measured
        best = [
            name
            for name, row in measured.items()
            if row["over transformers' best"] == "1.00 [1.00, 1.00]"
        ]
        assert any(name.startswith("transformers") for name in best)
        for name, row in measured.items():
            assert (row["target, of the step"] == "–") == name.startswith("transformers")
        assert measured[BASELINE]["over autoregressive"] == "1.00 [1.00, 1.00]"
