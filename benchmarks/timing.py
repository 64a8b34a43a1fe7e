"""Timing side by side with an A/A control, figures of records, and writing what was measured."""

import argparse
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nde_talf.decoding.common.bootstrap import interval, ratio_of_totals, samples, shown, times
from nde_talf.decoding.common.processor import cpu_model
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.environment import code
from nde_talf.evaluation.protocol import BASELINE, NOT_TRUSTED, trusted
from nde_talf.evaluation.protocol import CONTROL as PLAIN_AGAIN
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import by_setting, markdown

RESULTS = Path(__file__).with_name("results")
CONTROL = "A/A control"
CLOCKS = "wall time", "CPU time"


@dataclass
class Timings:
    """Median seconds of every task, by the wall's clock and of CPU time.

    Attributes:
        control: the A/A control, one task timed under two names in the same rounds: [second over
            first, low, high] by either clock, 95 % bootstrap over rounds.
    """

    seconds: dict[str, float]
    cpu: dict[str, float]
    control: dict[str, list[float]]

    def note(self, what: str = "") -> str:
        """Say below a table what the control says."""
        ratios = ", ".join(f"{shown(ratio, 3)} by {clock}" for clock, ratio in self.control.items())
        end = "." if all(map(trusted, self.control.values())) else f": {NOT_TRUSTED}."
        return f"A/A control{what}: {ratios}{end}"


def interleaved(tasks: dict[str, Callable[[], object]], repeats: int) -> Timings:
    """Time every task once in each of `repeats` rounds, in an order drawn anew.

    A round to warm up comes first. The first task is the control too: it runs a second time in each
    round.
    """
    first = next(iter(tasks))
    every, order = [*tasks.items(), (CONTROL, tasks[first])], random.Random(0)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in every}
    for turn in range(repeats + 1):
        for name, task in order.sample(every, len(every)):
            wall, cpu = time.perf_counter(), time.process_time()
            task()
            if turn:
                rounds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    medians = {name: np.median(each, axis=0) for name, each in rounds.items()}
    pairs = np.stack([rounds[CONTROL], rounds[first]])  # [2, rounds, clocks]
    resampled = np.median(pairs[:, samples(repeats)], axis=2)
    ratios = medians[CONTROL] / medians[first]
    control = {
        clock: interval(ratios[at], resampled[0, ..., at] / resampled[1, ..., at], repeats)
        for at, clock in enumerate(CLOCKS)
    }
    wall, cpu = ({name: float(medians[name][at]) for name in tasks} for at in range(len(CLOCKS)))
    return Timings(wall, cpu, control)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Make the parser of a command line, whose help is the module's docstring."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def rate(records: list[Record], above: str, below: str) -> list[float]:
    """Divide the sum of one field by the sum of another, with a 95 % interval over prompts."""
    pairs = [[getattr(record, above), getattr(record, below)] for record in records]
    return ratio_of_totals(np.array(pairs, dtype=float))


def doubts(records: list[Record]) -> list[str]:
    """Write a line for every setting whose clock is not trusted."""
    lines = []
    for setting, methods in by_setting(records).items():
        ratio = speed_ratio(methods.get(PLAIN_AGAIN, []), methods.get(BASELINE, []))
        if trusted(ratio) is False:
            lines.append(
                f"{setting}: {NOT_TRUSTED} (plain decoding against itself: {times(ratio)}); it"
                " supports no claim."
            )
    return lines


def report(
    name: str,
    columns: list[str],
    rows: list[list],
    notes: Sequence[str] = (),
    folder: Path | None = None,
    **more: Any,
) -> None:
    """Print a Markdown table with `notes` below, and write it to `folder`/<name>.md and .json.

    With it stand the command, in which absolute paths are cut to their last name, the commit, the
    processor, torch and its threads. folder: None: `RESULTS`; more: other content of the JSON.
    """
    spec, folder = sys.modules["__main__"].__spec__, folder or RESULTS
    module = spec.name if spec else Path(sys.argv[0]).stem
    given = [re.sub("^/.*(?=/.)", "...", each) for each in sys.argv[1:]]
    where = {
        "command": shlex.join(["python", "-m", module, *given]),
        "code": code(),
        "processor": cpu_model(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    text = markdown(columns, cells) + "\n" + "".join(f"\n{note}\n" for note in notes)
    print(text)
    folder.mkdir(exist_ok=True)
    line = ", ".join(f"{key} {value}" for key, value in where.items() if key != "command")
    (folder / f"{name}.md").write_text(f"`{where['command']}` ({line})\n\n{text}")
    content = {**where, "columns": columns, "rows": rows, "notes": list(notes), **more}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
