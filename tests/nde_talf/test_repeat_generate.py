"""The plugin that repeats every `generate` of other tests, on transformers' own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKOUT = "TRANSFORMERS_CHECKOUT"
PLUGINS = ("xdist", "cacheprovider", "faulthandler")
OPTIONS = ["-q", "-o", "addopts=", *(f"-pno:{name}" for name in PLUGINS)]


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
