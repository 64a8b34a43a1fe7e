"""Figures of one method from its benchmark records, with 95 % bootstrap intervals over prompts. Pure functions."""

import numpy as np

from evaluation.benchmark import Record

RESAMPLES = 2000
Interval = tuple[float, float, float]  # value, low, high


def rate(records: list[Record], above: str, below: str) -> Interval:
    """Sum of one field over the sum of another."""
    values = np.array([[getattr(record, above), getattr(record, below)] for record in records], dtype=float)
    return _interval(values, lambda sums: sums[..., 0] / sums[..., 1])


def speed_ratio(records: list[Record], others: list[Record]) -> Interval:
    """Tokens/s over that of `others`, prompts matched, both sides resampled together."""
    theirs = {record.prompt: record for record in others}
    pairs = [(r, theirs[r.prompt]) for r in records if r.prompt in theirs]
    values = np.array([[r.tokens, r.seconds, o.tokens, o.seconds] for r, o in pairs], dtype=float)
    return _interval(values, lambda s: s[..., 0] / s[..., 1] * s[..., 3] / s[..., 2])


def median_speed_ratio(records: list[Record], others: list[Record]) -> Interval:
    """The same as the median over prompts of each prompt's own ratio."""
    theirs = {record.prompt: record.tokens / record.seconds for record in others}
    ratios = np.array([r.tokens / r.seconds / theirs[r.prompt] for r in records if r.prompt in theirs])
    resampled = np.median(ratios[_draws(len(ratios))], axis=1)
    return float(np.median(ratios)), *np.quantile(resampled, [0.025, 0.975]).tolist()


def _interval(values: np.ndarray, figure) -> Interval:
    resampled = figure(values[_draws(len(values))].sum(1))
    return float(figure(values.sum(0))), *np.quantile(resampled, [0.025, 0.975]).tolist()


def _draws(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def shown(interval: Interval, digits: int = 2) -> str:
    """ "1.42 [1.31, 1.55]"."""
    value, low, high = (f"{x:.{digits}f}" for x in interval)
    return f"{value} [{low}, {high}]"
