"""Timing several things side by side, and writing what was found."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from evaluation.markdown import markdown

RESULTS = Path(__file__).with_name("results")


def interleaved(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of every task; all of them once in each of `repeats` rounds, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats + 1):
        for name, task in tasks.items():
            started = time.perf_counter()
            task()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def report(name: str, command: str, columns: list[str], rows: list[list], notes: Sequence[str] = ()) -> None:
    """Print a Markdown table with `notes` below, and write it with the machine it was measured on to results/<name>.md and
    .json."""
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    text = markdown(columns, cells) + "\n" + "".join(f"\n{note}\n" for note in notes)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    where = ", ".join(f"{key} {value}" for key, value in machine.items())
    (RESULTS / f"{name}.md").write_text(f"`{command}` ({where})\n\n{text}")
    content = {"command": command, **machine, "columns": columns, "rows": rows, **({"notes": list(notes)} if notes else {})}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
