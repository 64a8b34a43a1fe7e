"""Tests of vLLM end, also where vLLM does not."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.vllm_process import in_process

CHILD = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
json.dump({"child": child.pid, "given": json.load(open(sys.argv[1]))}, open(sys.argv[2], "w"))
"""


def gone(pid: int) -> bool:
    for _ in range(50):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return True
    return False


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks at processes as Linux lists them"
)
def test_a_script_that_ends_leaves_no_process(tmp_path):
    """Nor does the test wait for one that its script left over and that still holds the output."""
    ended = in_process(CHILD, [1, 2], tmp_path, seconds=60)
    assert ended["given"] == [1, 2] and gone(ended["child"])


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks at processes as Linux lists them"
)
def test_a_script_that_hangs_is_ended_and_fails(tmp_path):
    script = CHILD + "time.sleep(600)"
    with pytest.raises(
        pytest.fail.Exception, match=r"had not ended after 2 s, at a load of .* cores\. It wrote:"
    ):
        in_process(script, [], tmp_path, seconds=2)
    assert not [
        pid
        for pid in os.listdir("/proc")
        if pid.isdigit() and script_of(pid) == str(tmp_path / "script.py")
    ]


def script_of(pid: str) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1]
    return ""


def test_a_script_that_fails_says_why(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)status 1.*no such target"):
        in_process("raise SystemExit('no such target')", [], tmp_path, seconds=60)
