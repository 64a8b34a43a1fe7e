"""A stage that is killed at random moments goes on, and ends bit-equal to one that is not."""

import os
import random
import shutil
import signal
import sys

import pytest

import nde_talf.pipelines.run
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.pipelines.runs.manifest import read_manifest
from tests.pipelines import micro
from tests.robustness import child

pytestmark = pytest.mark.nightly
BEFORE = {
    "pair": [],
    "traces": ["pair"],
    "draft": ["pair"],
    "selector": ["pair", "latency", "traces"],
}
KILLS = 4


def result(stage):
    """The parts of a stage's result that two runs have in common."""
    if stage.name == "traces":
        return TraceStore(stage).shards
    weights = sorted(stage.rglob("*.safetensors"))
    return {
        str(path.relative_to(stage)): file_digest(path)
        for path in weights
        if "training" not in path.parts
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("stage", BEFORE)
def test_a_killed_stage_resumes_bit_equal(stage, number, finished, tmp_path):
    whole, run = finished / "checkpoints/default", tmp_path / "default"
    for name in BEFORE[stage]:
        shutil.copytree(whole / name, run / name)
    words = micro.command(
        finished,
        "tracking=disabled",
        "model.threads=1",
        f"stage={stage}",
        f"paths.checkpoints={tmp_path}",
    )[3:]
    moments, seconds = random.Random(stage), read_manifest(whole / stage)["seconds"]

    def command(moment):
        os.environ |= micro.environment()
        sys.argv = ["run", *words]
        if moment is not None:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
            signal.setitimer(signal.ITIMER_REAL, moment)
        nde_talf.pipelines.run.main()

    for _ in range(KILLS):
        moment = moments.uniform(0.1, max(1.0, seconds / 2))
        child.run(lambda moment=moment: command(moment), tmp_path)
    ended = child.run(lambda: command(None), tmp_path, child.Limits(seconds=600))
    assert ended.kind == child.WORKS, ended.text[-1000:]
    assert result(run / stage) == result(whole / stage)
