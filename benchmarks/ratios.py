"""Ratios of two methods under several settings, and their mean, with prompts resampled jointly."""

from collections.abc import Sequence

import numpy as np

from nde_talf.decoding.common.bootstrap import interval, samples
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.speed import WALL, sums_by_prompt


def speed_ratios(
    pairs: Sequence[tuple[list[Record], list[Record]]], clock: str = WALL
) -> tuple[list[list[float] | None], list[float] | None]:
    """Ratios of every pair (one a setting), and their geometric mean.

    The same resampled prompts count in all settings.
    """
    sums = [sums_by_prompt(*pair, clock) for pair in pairs]
    prompts = sorted(set().union(*sums))
    if not prompts:
        return [None] * len(sums), None
    indices, ratios = samples(len(prompts)), list[list[float] | None]()
    logs = []  # of the ratio itself, and resampled
    for totals in sums:
        if totals:
            values = np.array([totals.get(prompt, np.zeros(4)) for prompt in prompts])
            logs.append((_log_ratio(values.sum(0)), _log_ratio(values[indices].sum(1))))
        ratios.append(_interval(*logs[-1], len(totals)) if totals else None)
    mean = (np.mean(part, axis=0) for part in zip(*logs, strict=True))
    return ratios, _interval(*mean, len(prompts))


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may miss a setting's prompts
        return np.log(sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3]))


def _interval(log: np.ndarray, resampled: np.ndarray, count: int) -> list[float]:
    return np.exp(interval(log, resampled, count)).tolist()
