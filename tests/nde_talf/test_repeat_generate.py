"""The plugin that repeats every `generate` of other tests, on ten tests and on transformers' own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nde_talf.integrations import transformers as in_transformers
from tests.nde_talf.repeat_generate import Repeats

ROOT = Path(__file__).parents[2]
TEN = Path(__file__).with_name("ten_generate_tests.py")
CHECKOUT = "TRANSFORMERS_CHECKOUT"
PLUGINS = ("xdist", "cacheprovider", "faulthandler")
OPTIONS = ["-q", "-o", "addopts=", *(f"-pno:{name}" for name in PLUGINS)]


def repeated(*names: str) -> tuple[int, Repeats]:
    plugin = Repeats()
    files = [f"{TEN}::{name}" for name in names] or [str(TEN)]
    return pytest.main([*OPTIONS, *files], plugins=[plugin]), plugin


@pytest.mark.slow
def test_ten_tests_find_equal_texts_and_refusals():
    status, plugin = repeated()
    assert status == 0 and not plugin.faults
    assert plugin.counts == {"equal": 27, "refused": 6}


def test_another_text_fails_the_test(monkeypatch):
    right = in_transformers.Text.write
    wrong = lambda text: ((token + 1) % 40 for token in right(text))  # noqa: E731
    monkeypatch.setattr(in_transformers.Text, "write", wrong)
    status, plugin = repeated("test_greedy", "test_penalties")
    assert status == 1 and len(plugin.faults) == 2 and plugin.counts == {"different": 2}


@pytest.mark.nightly
@pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT}: a checkout of transformers")
@pytest.mark.parametrize("folder", ["generation", "models/llama", "models/gemma3", "models/gpt2"])
def test_transformers_own_tests_find_equal_texts_and_refusals(folder):
    """Tests that fail for other reasons, such as weights that are not there, count for nothing."""
    paths = [str(ROOT), str(Path(__file__).parent)]
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-p", "repeat_generate", f"tests/{folder}"]
    done = subprocess.run(
        [*command, "-k", "generat", "-o", "log_cli=false"],
        cwd=os.environ[CHECKOUT],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    summary = done.stdout.partition("generate, repeated through speculate")[2]
    print(summary)
    assert " equal" in summary and " different" not in summary, done.stdout[-3000:]
