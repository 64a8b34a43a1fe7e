"""Records of the benchmark turned into one row a method: pure functions of numbers."""

from dataclasses import dataclass

import numpy as np

from decoding.common.bootstrap import of_sums
from evaluation.benchmark import Record, together
from evaluation.protocol import BASELINE, CONTROL
from evaluation.speed import CPU, speed_ratio

__all__ = ["BASELINE", "Row", "by_kind", "by_setting", "control_of", "tabulate"]


@dataclass
class Row:
    """One method under one setting. block_efficiency: tokens a target pass, [value, low, high] (95 %, bootstrap over
    prompts). tokens_per_second: total tokens over total seconds. speedup: over autoregressive decoding, [value, low, high],
    see `evaluation.speed`; cpu_speedup: the same in CPU time, None where that was not taken. nodes: of a mean tree, root
    included. shares: of step time by phase."""

    method: str
    block_efficiency: list[float]
    tokens_per_second: float
    speedup: list[float]
    nodes: float
    shares: dict[str, float]
    cpu_speedup: list[float] | None = None
    tokens_per_cpu_second: float | None = None


def by_setting(records: list[Record]) -> dict[str, dict[str, list[Record]]]:
    """Records by setting and method, in the order in which they were first run; the A/A control comes second."""
    found: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        found.setdefault(record.setting, {}).setdefault(record.method, []).append(record)
    first = [BASELINE, CONTROL]
    return {
        setting: dict(sorted(own.items(), key=lambda item: first.index(item[0]) if item[0] in first else len(first)))
        for setting, own in found.items()
    }


def tabulate(records: list[Record]) -> dict[str, list[Row]]:
    """Rows by setting."""
    return {
        setting: [row(method, own, methods.get(BASELINE, [])) for method, own in methods.items() if any(r.steps for r in own)]
        for setting, methods in by_setting(records).items()
    }


def by_kind(records: list[Record]) -> dict[str, dict[str, list[Row]]]:
    """Rows by setting and domain of the prompts; empty where there is one domain."""
    kinds = list(dict.fromkeys(record.kind for record in records))
    tables = {kind: tabulate([r for r in records if r.kind == kind]) for kind in kinds}
    settings = dict.fromkeys(record.setting for record in records)
    return {s: {kind: tables[kind][s] for kind in kinds if s in tables[kind]} for s in settings} if len(kinds) > 1 else {}


def row(method: str, records: list[Record], baseline: list[Record]) -> Row:
    """The row of one method; records, baseline: of one setting."""
    records = [record for record in records if record.steps]
    counts = np.array([[r.tokens, r.steps] for r in sorted(together(records), key=lambda r: r.prompt)], dtype=float)
    tokens, steps = counts.sum(0)
    cpu, total = sum(r.cpu_seconds for r in records), sum(sum(r.phases.values()) for r in records)
    return Row(
        method=method,
        block_efficiency=of_sums(counts, lambda sums: sums[..., 0] / sums[..., 1]),
        tokens_per_second=float(tokens / sum(r.seconds for r in records)),
        speedup=speed_ratio(records, baseline) or [float("nan")] * 3,
        nodes=float(sum(r.nodes for r in records) / steps),
        shares={
            phase: sum(r.phases.get(phase, 0.0) for r in records) / total
            for phase in (records[0].phases if records and total else {})
        },
        cpu_speedup=speed_ratio(records, baseline, CPU),
        tokens_per_cpu_second=float(tokens / cpu) if cpu else None,
    )


def control_of(rows: list[Row]) -> list[float] | None:
    """The A/A control's ratio [value, low, high] in a table, if it has one."""
    return next((row.speedup for row in rows if row.method == CONTROL), None)
