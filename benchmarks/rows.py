"""Figures of one method from its benchmark records, with 95 % bootstrap intervals over prompts. Pure functions."""

import numpy as np

from evaluation.benchmark import Record
from evaluation.bootstrap import draws, interval, of_sums


def rate(records: list[Record], above: str, below: str) -> list[float]:
    """Sum of one field over the sum of another."""
    values = np.array([[getattr(record, above), getattr(record, below)] for record in records], dtype=float)
    return of_sums(values, lambda sums: sums[..., 0] / sums[..., 1])


def speed_ratio(records: list[Record], others: list[Record]) -> list[float]:
    """Tokens/s over that of `others`, prompts matched, both sides resampled together."""
    theirs = {record.prompt: record for record in others}
    pairs = [(r, theirs[r.prompt]) for r in records if r.prompt in theirs]
    values = np.array([[r.tokens, r.seconds, o.tokens, o.seconds] for r, o in pairs], dtype=float)
    return of_sums(values, lambda s: s[..., 0] / s[..., 1] * s[..., 3] / s[..., 2])


def median_speed_ratio(records: list[Record], others: list[Record]) -> list[float]:
    """The same as the median over prompts of each prompt's own ratio."""
    theirs = {record.prompt: record.tokens / record.seconds for record in others}
    ratios = np.array([r.tokens / r.seconds / theirs[r.prompt] for r in records if r.prompt in theirs])
    return interval(np.median(ratios), np.median(ratios[draws(len(ratios))], axis=1))
