"""One process at a time works on a run; the second is told who does; a kill leaves nothing stale."""

import os
import subprocess
import sys

import pytest

from nde_talf.pipelines.runs.lock import LOCK, locked
from tests.pipelines.micro import ROOT
from tests.refusal import refusal

HOLDER = """
import sys, time
from pathlib import Path
from nde_talf.pipelines.runs.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start(run, seconds):
    command = [sys.executable, "-c", HOLDER, str(run), str(seconds)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_a_second_process_is_refused_with_the_holders_name_and_a_killed_holder_leaves_nothing(
    tmp_path,
):
    run = tmp_path / "run"
    holder = start(run, 60)
    assert holder.stdout.readline() == "held\n"
    (run / "pair").mkdir()
    (run / "pair/.file.1-0badcafe.tmp").touch()
    with (
        refusal(rf"process {holder.pid} on .*since.*wait until it ends|process {holder.pid} on"),
        locked(run),
    ):
        pass
    assert (run / "pair/.file.1-0badcafe.tmp").exists(), "another process is at work there"
    holder.kill()
    holder.wait()
    with locked(run):
        assert not (run / "pair/.file.1-0badcafe.tmp").exists()


@pytest.mark.slow
def test_a_fork_drops_nothing(tmp_path):
    held = locked(tmp_path)
    with held:
        forked = os.fork()
        if not forked:
            held.__exit__(None, None, None)
            os._exit(not (tmp_path / LOCK).exists())
        assert os.waitpid(forked, 0)[1] == 0
        child = start(tmp_path, 0)  # another program
        assert child.wait(60) == 1 and f"process {os.getpid()} on" in child.stderr.read()
    child = start(tmp_path, 0)
    assert child.wait(60) == 0


MANY = """
import os, sys, time
from pathlib import Path
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.runs.lock import locked
inside, refused = os.path.join(sys.argv[1], "inside"), 0
for _ in range(300):
    try:
        with locked(Path(sys.argv[1])):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            os.remove(inside)
    except UserError:
        refused += 1
print(refused)
"""


@pytest.mark.slow
def test_many_that_come_at_once_hold_it_one_by_one(tmp_path):
    """Whatever the moment at which one ends and removes the file of the lock."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path)], cwd=ROOT, **pipes)
        for _ in range(4)
    ]
    refused = 0
    for process in processes:
        printed, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        refused += int(printed)
    assert refused, "they never met"


def test_a_run_that_was_never_begun_leaves_no_folder(tmp_path):
    with locked(tmp_path / "run"):
        pass
    assert not list(tmp_path.iterdir())
