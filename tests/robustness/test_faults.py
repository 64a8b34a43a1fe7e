"""Faults planted in verification, one at a time: the tests that ought to notice each do.

A line of faults.jsonl says which text of which file becomes what, and which tests have to fail. A
fault whose text is no longer there is an error: the list follows the code.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

LINES = Path(__file__).with_name("faults.jsonl").read_text().splitlines()
FAULTS = [json.loads(line) for line in LINES]
UNUSED = shutil.ignore_patterns(".*", "__pycache__", "checkpoints", "results", "site", "wandb")
FAILED = 1
"""Status of pytest where a test failed."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository, in which faults are planted."""
    folder = tmp_path_factory.mktemp("planted") / "repository"
    shutil.copytree(ROOT, folder, ignore=UNUSED, symlinks=True)
    return folder


def test_the_texts_of_all_faults_are_in_the_code():
    assert [(ROOT / fault["file"]).read_text().count(fault["old"]) for fault in FAULTS] == [
        1 for _ in FAULTS
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_planted_fault_is_noticed(fault, copy):
    file = copy / fault["file"]
    text = file.read_text()
    file.write_text(text.replace(fault["old"], fault["new"]))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *fault["tests"]], cwd=copy, capture_output=True, text=True, timeout=900
        )
    finally:
        file.write_text(text)
    assert done.returncode == FAILED, done.stdout[-1000:]
