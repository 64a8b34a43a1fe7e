"""Figures from records of the benchmark: a row per method, and accepted drafts.

Pure functions of records.

Block efficiency is the mean of committed tokens per target pass: accepted drafts and one token of
the target's own, tau + 1. vLLM calls it mean acceptance length. A step's acceptance length here
counts accepted drafts alone, from 0.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nde_talf.decoding.common.bootstrap import ratio_of_totals, sums_by_prompt
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed import CPU, speed_ratio


@dataclass
class Row:
    """One method under one setting.

    Intervals are [value, low, high], 95 %, by bootstrap over prompts.

    Attributes:
        method: its title.
        block_efficiency: tokens per target pass, an interval.
        tokens_per_second: total tokens over total seconds.
        speedup: over autoregressive decoding, an interval; see `nde_talf.evaluation.speed`.
        nodes: of a mean tree, root included.
        shares: fractions of step time by phase.
        cpu_speedup: the speedup in CPU time; None if not measured.
        outside: whether transformers' own loop decoded it.
    """

    method: str
    block_efficiency: list[float]
    tokens_per_second: float
    speedup: list[float]
    nodes: float
    shares: dict[str, float]
    cpu_speedup: list[float] | None = None
    outside: bool = False


def by_setting(records: Iterable[Record]) -> dict[str, dict[str, list[Record]]]:
    """Group records by setting and method: plain decoding, control, others as first run."""
    grouped: dict[str, dict[str, list[Record]]] = {}
    first = (BASELINE, CONTROL)
    for record in sorted(records, key=lambda r: (*first, r.method).index(r.method)):
        grouped.setdefault(record.setting, {}).setdefault(record.method, []).append(record)
    return grouped


def tabulate(records: Iterable[Record]) -> dict[str, list[Row]]:
    """Make rows by setting."""
    return {
        setting: [
            row(method, method_records, methods.get(BASELINE, []))
            for method, method_records in methods.items()
            if any(r.steps for r in method_records)
        ]
        for setting, methods in by_setting(records).items()
    }


def row(method: str, records: list[Record], baseline: list[Record]) -> Row:
    """Make the row of one method; records, baseline: of one setting."""
    records = [record for record in records if record.steps]
    counts = np.array([[r.tokens, r.steps, r.nodes, r.seconds] for r in records])
    tokens, steps, nodes, seconds = counts.sum(0).tolist()
    by_prompt = sums_by_prompt(counts[:, :2], np.array([r.prompt for r in records]))
    phases = {phase: sum(r.phases.get(phase, 0.0) for r in records) for phase in records[0].phases}
    total = sum(phases.values())
    return Row(
        method=method,
        block_efficiency=ratio_of_totals(by_prompt),
        tokens_per_second=tokens / seconds,
        speedup=speed_ratio(records, baseline) or [float("nan")] * 3,
        nodes=nodes / steps,
        shares={phase: part / total for phase, part in phases.items()} if total else {},
        cpu_speedup=speed_ratio(records, baseline, CPU),
        outside=records[0].outside,
    )


def control_of(rows: list[Row]) -> list[float] | None:
    """Return the A/A control's ratio [value, low, high] in a table, or None."""
    return next((row.speedup for row in rows if row.method == CONTROL), None)


def steps_by_tree(records: list[Record]) -> dict[str, int]:
    """Count steps by chosen tree; empty for a method that does not choose."""
    return dict(sum((Counter(record.actions) for record in records), Counter()))


def histogram(records: list[Record]) -> list[int]:
    """Count steps by accepted drafted tokens: index n counts the steps that accepted n.

    Empty if steps were not counted.
    """
    counts = sum((Counter(record.accepted) for record in records), Counter())
    return [counts[str(length)] for length in range(max(map(int, counts)) + 1)] if counts else []


def acceptance_by_position(counts: list[int]) -> list[float]:
    """Return the fraction of steps that accepted a token at position 0, 1, ..., as vLLM reports.

    counts: see `histogram`.
    """
    return [sum(counts[place + 1 :]) / sum(counts) for place in range(len(counts) - 1)]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
