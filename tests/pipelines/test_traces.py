"""Stage traces by other means: real vLLM, two Ray workers of which one is killed; and a store that
is checked and mended.
"""

import importlib.util
import json
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from nde_talf.data.traces.store import TraceStore
from tests.pipelines import micro
from tests.pipelines.launch import printed_by
from tests.pipelines.micro import ROOT, command, environment

pytestmark = pytest.mark.slow

HEADS = [
    "model.target_lm.heads=1",
    "model.draft_lm.heads=1",
]  # vLLM on a CPU wants heads of 32 numbers


def needs(module):
    return [
        getattr(pytest.mark, module),
        pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"no {module}"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with its pair and its traces from one process."""
    folder = tmp_path_factory.mktemp("traced")
    for stage in ("pair", "traces"):
        printed_by(folder, *HEADS, f"stage={stage}")
    return folder


def with_pair(folder, name):
    """The override for a run of that name, whose pair is a copy."""
    shutil.copytree(folder / "checkpoints/default/pair", folder / "checkpoints" / name / "pair")
    return f"run={name}"


def shards(folder, name):
    return json.loads((folder / "checkpoints" / name / "traces/shards.json").read_text())["shards"]


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs("ray"))])
def test_two_workers_one_killed_make_the_same_shards(folder, mark):
    import psutil

    process = subprocess.Popen(
        command(folder, *HEADS, with_pair(folder, "workers"), "stage=traces", "engine.workers=2"),
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    out, deadline = folder / "checkpoints/workers/traces", time.monotonic() + 200
    while not list(out.glob("*.parquet")):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(process.communicate()[0])
        time.sleep(0.02)
    actors = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "Actor" in " ".join(p.cmdline())
    ]
    assert actors
    actors[0].send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert shards(folder, "workers") == shards(folder, "default")


def both_splits(store):
    """Labels as means over a root's super-trees, of which a split may have more."""
    splits = [store.read("train"), store.read("validation")]
    means = [
        {name: x.mean(1) if x.ndim == 3 else x for name, x in split.items()} for split in splits
    ]
    return {name: np.concatenate([split[name] for split in means]) for name in means[0]}


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs("vllm"))])
def test_vllm_makes_the_same_labels_within_their_error_and_the_same_file_twice(folder, mark):
    for name in ("vllm", "again"):
        done = micro.run(
            folder, *HEADS, with_pair(folder, name), "stage=traces", "engine.name=vllm"
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert shards(folder, "vllm") == shards(folder, "again")
    ours, theirs = (
        both_splits(TraceStore(folder / "checkpoints" / name / "traces"))
        for name in ("default", "vllm")
    )
    for verifier in ("specinfer", "naivetree", "traversal"):
        for temperature in (0.6, 1.0):
            prompts = []  # [prompts, 233]: the roots of a prompt are not independent
            for table in (ours, theirs):
                rows = np.isclose(table["temperature"], temperature)
                labels, ids = table[verifier][rows], table["prompt_id"][rows]
                prompts.append(
                    np.stack([labels[ids == prompt].mean(0) for prompt in np.unique(ids)])
                )
            means, errors = zip(
                *((x.mean(0), x.std(0, ddof=1) / len(x) ** 0.5) for x in prompts), strict=True
            )
            difference = np.abs(means[0] - means[1])[1:] / np.hypot(*errors)[1:]
            assert difference.mean() < 2.5, (verifier, temperature)
