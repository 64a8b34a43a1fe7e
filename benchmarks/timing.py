"""Timing several things side by side, and writing what was found."""

import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nde_talf.decoding.common.bootstrap import interval, samples, shown
from nde_talf.evaluation.protocol import NOT_TRUSTED
from nde_talf.evaluation.table import markdown

RESULTS = Path(__file__).with_name("results")
CONTROL = "A/A control"


@dataclass
class Timings:
    """Median seconds of every task, by the wall's clock and of CPU time. control: the A/A control,
    one task timed under two names in the same rounds: [second over first, low, high] by either
    clock, 95 % bootstrap over rounds.
    """

    seconds: dict[str, float]
    cpu: dict[str, float]
    control: dict[str, list[float]]

    def note(self, what: str = "") -> str:
        """What the control says, as a line below a table."""
        found = ", ".join(f"{shown(ratio, 3)} by {clock}" for clock, ratio in self.control.items())
        right = all(low <= 1 <= high for _, low, high in self.control.values())
        return f"A/A control{what}, one task against itself: {found}" + (
            "." if right else f": {NOT_TRUSTED}."
        )


def interleaved(tasks: dict[str, Callable[[], object]], repeats: int) -> Timings:
    """Time every task once in each of `repeats` rounds, in an order drawn anew, after one round to
    warm up.

    The first task is the control too: it runs a second time in each round.
    """
    first = next(iter(tasks))
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*tasks, CONTROL)}
    every, order = [*tasks.items(), (CONTROL, tasks[first])], random.Random(0)
    for turn in range(repeats + 1):
        for name, task in order.sample(every, len(every)):
            wall, cpu = time.perf_counter(), time.process_time()
            task()
            if turn:
                rounds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    values = {name: np.array(own) for name, own in rounds.items()}
    pairs = np.stack([values[CONTROL], values[first]])  # [2, rounds, clocks]
    resampled = np.median(pairs[:, samples(repeats)], axis=2)
    ratios, found = resampled[0] / resampled[1], np.median(pairs, axis=1)
    return Timings(
        *(
            {name: float(np.median(own[:, clock])) for name, own in values.items() if name in tasks}
            for clock in (0, 1)
        ),
        {
            name: interval(found[0, at] / found[1, at], ratios[:, at])
            for at, name in enumerate(("wall time", "CPU time"))
        },
    )


def report(
    name: str, command: str, columns: list[str], rows: list[list], notes: Sequence[str] = ()
) -> None:
    """Print a Markdown table with `notes` below, and write it with the machine it was measured on
    to results/<name>.md and .json.
    """
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    text = markdown(columns, cells) + "\n" + "".join(f"\n{note}\n" for note in notes)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    where = ", ".join(f"{key} {value}" for key, value in machine.items())
    (RESULTS / f"{name}.md").write_text(f"`{command}` ({where})\n\n{text}")
    content = {
        "command": command,
        **machine,
        "columns": columns,
        "rows": rows,
        **({"notes": list(notes)} if notes else {}),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
