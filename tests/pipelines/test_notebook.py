"""The notebook runs from top to bottom: with the small pair, and nightly with SmolLM2."""

import json

import pytest

from nde_talf.data.text.shipped import HUB
from nde_talf.pipelines.commands.fetch import fetch
from tests import ROOT

NOTEBOOK = ROOT / "docs/first_hour.ipynb"


def cells(kind):
    content = json.loads(NOTEBOOK.read_text())
    return ["".join(each["source"]) for each in content["cells"] if each["cell_type"] == kind]


def run_all(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names: dict = {"__name__": "notebook"}
    for number, code in enumerate(cells("code")):
        exec(compile(code, f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    return names


@pytest.mark.long
def test_the_notebook_runs_with_the_small_pair(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nde_talf.data.text.shipped.smollm2", lambda: HUB)
    names = run_all(tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert names["run"] == "small" and len(names["trees"][names["step"]]) > 1
    assert "committed:" in printed and "tokens a pass" in printed
    assert (tmp_path / "upload/selector-traversal/vectors.safetensors").is_file()


@pytest.mark.nightly
def test_the_notebook_runs_with_smollm2(tmp_path, monkeypatch, capsys):
    fetch()  # into the tests' own cache
    names = run_all(tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert names["run"] == "smollm2" and len(names["trees"][names["step"]]) > 1
    assert printed.count("ours: ") == 2 and "committed:" in printed
    assert (tmp_path / "upload/selector-traversal/vectors.safetensors").is_file()


def test_the_notebook_is_stored_without_outputs():
    content = json.loads(NOTEBOOK.read_text())
    assert not any(each.get("outputs") for each in content["cells"])
    assert cells("markdown") and cells("code")
