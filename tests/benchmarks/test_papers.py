"""Papers print their tables from a tiny pair."""

import sys
from importlib import import_module

import pytest

pytestmark = pytest.mark.slow

PAPERS = {
    "gbv": (["--lengths", "8"], ["Tables 1 and 3", "Table 6", "SpecInfer, K=4"]),
    "dynatree": (["--nodes", "8"], ["Tables 1 to 3", "Table 5", "Fixed tree, D = 5, B = 2"]),
    "dyspec": (["--budgets", "8"], ["Tables 1 to 4", "Method | code |", "| 256 | 36.0 |"]),
}


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_prints_its_tables(run, paper, tmp_path, monkeypatch, capsys):
    options, words = PAPERS[paper]
    shared = ["--run", run, "--prompts", 1, "--new-tokens", 6, "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", [paper, *map(str, shared), *options])
    import_module(f"benchmarks.papers.{paper}").main()
    printed = capsys.readouterr().out
    assert all(word in printed for word in words) and "nan" not in printed
    assert list(tmp_path.glob(f"{paper}*.jsonl"))
