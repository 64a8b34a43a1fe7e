"""The trace store at size: seconds of 10,000 shards, of opening them and of reading a column; roots
a second of two writers.

`python -m benchmarks.trace_store [--shards 10000]`. Shards are small in the first table, so that
what is measured is their number. In the second, one and two processes write shards of 256 roots of
the size of the Qwen-2.5 pair's.
"""

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.timing import report
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.actions import TREES

ROWS = 256


def small(shard: int) -> dict:
    split = "train" if shard % 8 else "validation"
    return {
        "split": [split] * 4,
        "context": torch.arange(4),
        "h_q_root": torch.full((4, 8), float(shard)).half(),
    }


def growth(folder: Path, count: int) -> list[list[str]]:
    """Seconds of every tenth of the shards, then of what reads them."""
    store, rows = TraceStore(folder), []
    for part in range(10):
        started, cpu = time.monotonic(), time.process_time()
        for shard in range(part * count // 10, (part + 1) * count // 10):
            store.write(store.name(shard, count), small(shard))
        rows.append([f"write {count // 10:,} after {part * count // 10:,}", started, cpu])
        rows[-1][1:] = [f"{time.monotonic() - started:.2f} s", f"{time.process_time() - cpu:.2f} s"]
    for what, action in (
        ("open the unfinished store", lambda: TraceStore(folder)),
        ("finish it", store.finish),
        ("open the finished store", lambda: TraceStore(folder)),
        (
            "read a column of an eighth of it",
            lambda: TraceStore(folder).read("validation", ["context"]),
        ),
        ("check all of it", lambda: TraceStore(folder).faults()),
    ):
        started, cpu = time.monotonic(), time.process_time()
        action()
        rows.append(
            [what, f"{time.monotonic() - started:.2f} s", f"{time.process_time() - cpu:.2f} s"]
        )
    return rows


def write(folder: str, first: int, last: int, ready, go) -> None:
    torch.set_num_threads(1)
    store = TraceStore(folder)
    columns = {
        "split": ["train"] * ROWS,
        "h": torch.randn(ROWS, 6912).half(),
        "labels": torch.rand(ROWS, 4, 6 * len(TREES)),
    }
    ready.release()
    go.wait()
    for shard in range(first, last):
        store.write(store.name(shard, 10_000), columns)


def speed(folder: Path, writers: int, seconds_of: int) -> float:
    """Roots a second of so many processes."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    each = seconds_of // writers
    processes = [
        context.Process(target=write, args=(str(folder), i * each, (i + 1) * each, ready, go))
        for i in range(writers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    started = time.monotonic()
    go.set()
    for process in processes:
        process.join()
    return each * writers * ROWS / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument(
        "--large",
        type=int,
        default=60,
        help="shards of 256 roots that each number of processes writes",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = growth(Path(name) / "small", options.shards)
        rates = [
            speed(Path(name) / f"{turn}-{writers}", writers, options.large)
            for turn in range(3)
            for writers in (1, 2)
        ]
    one, two = (sorted(rates[i::2])[1] for i in (0, 1))
    note = (
        f"Shards of {ROWS} roots: one process writes {one:,.0f} roots/s, two {two:,.0f},"
        f" {two / one:.2f} times as many (medians of three turns; this machine has"
        f" {multiprocessing.cpu_count()} logical CPUs)."
    )
    report(
        "trace_store",
        "python -m benchmarks.trace_store",
        ["", "wall time", "CPU time"],
        rows,
        [note],
    )


if __name__ == "__main__":
    main()
