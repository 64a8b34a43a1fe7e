"""Records of the benchmark turned into one row a method: pure functions of numbers."""

from dataclasses import dataclass

import numpy as np

from evaluation.benchmark import Record
from evaluation.bootstrap import draws, interval, of_sums

BASELINE = "autoregressive"


@dataclass
class Row:
    """One method under one setting. block_efficiency: tokens a target pass, [value, low, high] (95 %, bootstrap over
    prompts). tokens_per_second: total tokens over total seconds. speedup: median over prompts of the ratio of
    tokens/s to the autoregressive run of the same prompt, [value, low, high]. nodes: of a mean tree, root included.
    shares: of step time by phase."""

    method: str
    block_efficiency: list[float]
    tokens_per_second: float
    speedup: list[float]
    nodes: float
    shares: dict[str, float]


def tabulate(records: list[Record]) -> dict[str, list[Row]]:
    """Rows by setting, in the order the methods were first run."""
    tables: dict[str, list[Row]] = {}
    for setting in dict.fromkeys(record.setting for record in records):
        here = [record for record in records if record.setting == setting]
        baseline = {r.prompt: r.tokens / r.seconds for r in here if r.method == BASELINE and r.seconds > 0}
        tables[setting] = [
            _row(method, [r for r in here if r.method == method and r.steps], baseline)
            for method in dict.fromkeys(record.method for record in here)
        ]
    return tables


def _row(method: str, records: list[Record], baseline: dict[str, float]) -> Row:
    tokens, steps, seconds = (np.array([getattr(r, name) for r in records]) for name in ("tokens", "steps", "seconds"))
    ratios = np.array([r.tokens / r.seconds / baseline[r.prompt] for r in records])
    total = sum(sum(r.phases.values()) for r in records)
    return Row(
        method=method,
        block_efficiency=of_sums(np.stack([tokens, steps], 1), lambda sums: sums[..., 0] / sums[..., 1]),
        tokens_per_second=float(tokens.sum() / seconds.sum()),
        speedup=interval(np.median(ratios), np.median(ratios[draws(len(ratios))], axis=1)),
        nodes=float(sum(r.nodes for r in records) / steps.sum()),
        shares={
            phase: sum(r.phases.get(phase, 0.0) for r in records) / total
            for phase in (records[0].phases if records and total else {})
        },
    )
