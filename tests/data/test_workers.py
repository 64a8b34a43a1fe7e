"""Work spread over a local Ray cluster of two: nothing is lost or doubled when workers are killed,
nothing waits for ever.
"""

import importlib.util
import os
import subprocess
import sys
import time
from functools import partial

import pytest

from nde_talf import UserError
from nde_talf.decoding.common import parallel
from nde_talf.decoding.common.parallel import Workers
from tests.refusal import refusal

needs_ray = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


LISTEN = """
import os, psutil
from nde_talf.decoding.common.parallel import Workers
with Workers(dict, 2, None, 0) as workers:
    assert sorted(workers.map(lambda worker, x: x, [(1,), (2,)])) == [(0, 1), (1, 2)]
    ours = {child.pid for child in psutil.Process().children(recursive=True)} | {os.getpid()}
    print("listens", *(c.laddr.ip for c in psutil.net_connections("inet") if c.pid in ours and c.status == psutil.CONN_LISTEN))
"""


class Squares:
    """Squares numbers; dies the first time it is asked for the square of 3, always for 13, and
    complains of 99.
    """

    def __init__(self, folder):
        self.folder = folder

    def square(self, x):
        if x == 13 or (x == 3 and not (self.folder / "died").exists()):
            (self.folder / "died").touch()
            os.kill(os.getpid(), 9)
        if x == 99:
            raise UserError("99 is too much")
        return x * x


def run(folder, numbers, count, work=Squares.square, gpus=0):
    with Workers(partial(Squares, folder), count, None, gpus) as workers:
        return list(workers.map(work, [(x,) for x in numbers]))


@pytest.fixture
def ray():
    """Ray, with the local cluster of this module."""
    import ray

    return ray


def test_in_one_process_items_come_in_order(tmp_path):
    assert run(tmp_path, [2, 4, 5], 1) == [(0, 4), (1, 16), (2, 25)]
    with refusal("too much"):
        run(tmp_path, [99], 1)


class TestRay:
    pytestmark = needs_ray

    def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_doubled(self, tmp_path, ray):
        results = run(tmp_path, list(range(8)), 2)
        assert (tmp_path / "died").exists()
        assert sorted(results) == [(i, i * i) for i in range(8)]
        with refusal("too much"):
            run(tmp_path, [1, 99], 2)

    def test_a_unit_that_kills_every_worker_is_named(self, tmp_path, ray):
        with refusal("4 workers died over unit 1 of square"):
            run(tmp_path, [1, 13, 2], 2)

    def test_gpus_that_the_cluster_has_not_are_named_at_once(self, tmp_path, ray):
        started = time.monotonic()
        with refusal(r"engine.workers=2 with 1 GPUs each.*the cluster has 0 GPUs.*room for 0"):
            run(tmp_path, [1, 2], 2, gpus=1)
        assert time.monotonic() - started < 30  # with the start of the cluster

    def test_a_cluster_that_does_not_answer_is_named_in_seconds(self, tmp_path, ray):
        ray.shutdown()
        started = time.monotonic()
        for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
            with refusal(f"ray.address={address}: no Ray cluster answers"):
                parallel.start_ray(address)
        assert time.monotonic() - started < 15

    def test_a_cluster_of_ones_own_listens_on_the_loopback_alone(self):
        done = subprocess.run(
            [sys.executable, "-c", LISTEN], capture_output=True, text=True, timeout=120
        )
        lines = done.stdout.splitlines()  # Ray prints some of its own among them
        addresses = next(line.split()[1:] for line in lines if line.startswith("listens "))
        assert len(addresses) > 4 and {a.removeprefix("::ffff:") for a in addresses} == {
            "127.0.0.1"
        }, done
