"""What is printed is what was meant: no markup in it, one line for a signal, and a cause for what a
library wraps.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nde_talf import UserError
from nde_talf.decoding.common.progress import console, track, working
from nde_talf.pipelines.config.command_line import answer
from tests.pipelines.micro import ROOT, environment


@pytest.mark.parametrize(
    "text", ["[/x]", "[bold]a[/bold]", ":smile: [link=x]", "! /data/[v2]: is full"]
)
def test_a_message_is_shown_as_it_is(capsys, text):
    console.print(text, soft_wrap=True)
    console.print(text, style="dim", soft_wrap=True)
    with working(text):
        pass
    assert list(track([1], text, 1)) == [1]
    shown = capsys.readouterr().out
    assert shown.count(text) == 4, shown


@pytest.mark.slow
def test_a_reader_of_the_help_may_leave():
    read, write = os.pipe()
    os.close(read)
    asked = [sys.executable, "-m", "nde_talf.cli", "generate", "--help"]
    done = subprocess.run(
        asked, cwd=ROOT, env=environment(), stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    assert done.returncode == 1 and not done.stderr


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the signals that a process handles are read from /proc",
)
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_command_with_one_line(sign):
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.run", "stage=none"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    handled, deadline = 0, time.monotonic() + 60
    while not handled >> (signal.SIGTERM - 1) & 1 and time.monotonic() < deadline:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        handled = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    process.send_signal(sign)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (128 + sign, "", "\nInterrupted.\n")


@pytest.mark.parametrize(
    "error,said",
    [
        (UserError("model.target: no"), "model.target: no"),
        (MemoryError(), "memory is too small"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: the disk is full"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "/data/x"),
            "/data/x: File name too long. Give another",
        ),
    ],
)
def test_what_a_person_can_change_is_answered_also_where_a_library_wraps_it(capsys, error, said):
    for shown in (error, *([] if isinstance(error, UserError) else [wrapped(error)])):
        with pytest.raises(SystemExit) as ended:
            answer(shown)
        assert ended.value.code == 1 and said in " ".join(
            capsys.readouterr().out.replace("│", " ").split()
        )


def test_what_nobody_can_change_is_raised():
    with pytest.raises(KeyError):
        answer(KeyError("a fault of ours"))


def wrapped(error):
    try:
        raise ValueError("an error occurred") from error
    except ValueError as other:
        return other
