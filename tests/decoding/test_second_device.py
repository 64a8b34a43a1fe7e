"""A draft on another device than the target's: what is decoded and traced is what one device gives."""

import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.slow
def test_a_draft_on_a_device_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "tests.decoding.second_device"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "equal on two devices" in done.stdout, done.stderr
