"""Latency of whole generations: medians and 95th percentiles, by the names that serving benchmarks use. Pure functions."""

import numpy as np

from evaluation.benchmark import Record

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "latency": "whole generation",
}


def latencies(records: list[Record]) -> dict[str, dict[str, float]]:
    """p50 and p95 in seconds of each of LATENCIES over one method's generations. Empty where no first token was timed."""
    records = [record for record in records if record.tokens and record.first_seconds]
    if not records:
        return {}
    values = {
        "ttft": [r.first_seconds for r in records],
        "tpot": [r.seconds / r.tokens for r in records],
        "latency": [r.first_seconds + r.seconds for r in records],
    }
    return {
        name: dict(zip(("p50", "p95"), np.quantile(own, [0.5, 0.95]).tolist(), strict=True)) for name, own in values.items()
    }
