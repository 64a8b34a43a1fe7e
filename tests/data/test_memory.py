"""Memory is bounded by a chunk of rows; and when it runs out, micro-batches shrink."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

TRACE = """
import json, os, resource, sys
import torch
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.data.traces import trace as traces
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding.sampling.rng import SamplingSetting
from tests.decoding.pairs import tiny_pair

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def main(vocabulary, hidden, layers, tokens, micro_batch, chunk, room):
    traces.NUMBERS = chunk * vocabulary
    torch.set_num_threads(1)
    target, draft = tiny_pair(vocabulary, hidden=hidden, layers=layers)
    def trace(size, length, samples):
        config = TracesConfig(samples=samples, stride=8, micro_batch=size,
                              verifiers=["specinfer", "gbv"])
        prompt = Prompt("p", "k", "", list(range(1, 9)), "train")
        batch = MicroBatch(size)
        columns = trace_trajectories(target, draft, [prompt], [list(range(1, length))], [SamplingSetting(0.8)], config,
                                     batch, 0)
        return columns, batch.size
    trace(1, 12, 2)
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # from here on VmHWM is the peak of what follows
    if room:
        alone, _ = trace(2, tokens, 4)
        limit = status("VmSize") + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    columns, size = trace(micro_batch, tokens, 4)
    same = room and all(torch.allclose(columns[n], alone[n], atol=1e-4) for n in ("specinfer", "gbv"))
    return {"size": size, "peak": status("VmHWM") - before, "same": bool(same)}

for options in json.loads(sys.argv[1]):  # each in a process of its own, which has nothing to import
    if not os.fork():
        print(json.dumps(main(**options)), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


def traced(*options):
    done = subprocess.run(
        [sys.executable, "-c", TRACE, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # freed memory is given back
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not tell a process its peak memory")
    assert done.returncode == 0, done.stderr
    told = "from here on" in done.stdout
    assert told == any(each["room"] for each in options), done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


WIDE = {"vocabulary": 8_000, "hidden": 16, "layers": 1, "tokens": 20, "micro_batch": 4, "room": 0}
DEEP = {
    "vocabulary": 100,
    "hidden": 256,
    "layers": 4,
    "tokens": 40,
    "micro_batch": 16,
    "chunk": 400,
    "room": 50 << 20,
}


@pytest.fixture(scope="module")
def peaks():
    return traced(WIDE | {"chunk": 261}, WIDE | {"chunk": 1044}, DEEP)  # a tree, four trees


def test_the_peak_grows_with_the_chunk(peaks):
    small, large, _ = peaks
    assert large["peak"] > 2 * small["peak"], (small, large)


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing(peaks):
    *_, short = peaks
    assert short["size"] < DEEP["micro_batch"] and short["same"], short
