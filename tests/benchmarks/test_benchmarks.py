"""The benchmark of decoding runs from its command line on a tiny pair, and its figures are what they
say.
"""

import json
import re
import sys

import pytest

from benchmarks import decode, timing
from nde_talf import Beam
from nde_talf.evaluation import methods
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.static_trees import Picked


def kind(method):
    """A method's name without what was chosen for it."""
    return re.sub(r" \([^)]*\)", "", method)


@pytest.mark.slow
def test_the_loop_beside_transformers(run, tmp_path, monkeypatch):
    for grid in ("LOOKUPS", "SCHEDULES", "UNLABELLED_TREES"):  # fewer settings to try
        monkeypatch.setattr(methods, grid, getattr(methods, grid)[-2:])
    tree = Picked("Traversal", Beam(2, 2, 4), {})
    monkeypatch.setattr(methods, "PICKED", (tree,))
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    small = "decode --prompts 2 --tuning 1 --new-tokens 12 --run"
    monkeypatch.setattr(sys, "argv", [*small.split(), str(run)])
    decode.main()
    written = json.loads((tmp_path / "decode.json").read_text())
    rows = [dict(zip(written["columns"], row, strict=True)) for row in written["rows"]]
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
