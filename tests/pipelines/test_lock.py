"""One process at a time works on a run; the second is told who does; a kill leaves nothing stale."""

import subprocess
import sys

from nde_talf.pipelines.runs.lock import locked
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
