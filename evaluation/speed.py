"""Speed-ups: ratios of total tokens/s, paired by prompt, with bootstrap intervals.

Pure functions of records.

The one place where a speed-up is computed; see `nde_talf.evaluation.protocol` for what it means.
"""

from collections.abc import Sequence

import numpy as np

from nde_talf.decoding.common.bootstrap import interval, samples
from nde_talf.evaluation.benchmark import Record

WALL, CPU = "seconds", "cpu_seconds"  # fields of a record
MEAN = "mean over settings"

Pair = tuple[list[Record], list[Record]]  # of one setting: ours, theirs


def speed_ratio(ours: list[Record], theirs: list[Record], clock: str = WALL) -> list[float] | None:
    """[ratio, low, high] of our total tokens/s to theirs, on the blocks (prompt and pass) of both.

    None: there are none, or one side was not timed by this clock. Example: 30 tokens in 1 s against
    20 in 2 s is 3.
    """
    return speed_ratios([(ours, theirs)], clock)[0][0]


def speed_ratios(
    pairs: Sequence[Pair], clock: str = WALL
) -> tuple[list[list[float] | None], list[float] | None]:
    """`speed_ratio` of every pair (one a setting), and the geometric mean of at least two.

    The same resampled prompts count in all settings.
    """
    sums = [_sums(*pair, clock) for pair in pairs]
    prompts = sorted(set().union(*sums))
    indices = samples(len(prompts)) if prompts else None
    logs: list[tuple[np.ndarray, np.ndarray] | None] = []  # of the ratio itself, and resampled
    for own in sums:
        values = np.array([own.get(prompt, (0.0,) * 4) for prompt in prompts])
        logs.append(
            (_log_ratio(values.sum(0)), _log_ratio(values[indices].sum(1))) if own else None
        )
    found = [log for log in logs if log]
    mean = (
        _ratio(*(np.mean(own, axis=0) for own in zip(*found, strict=True)))
        if len(found) > 1
        else None
    )
    return [log and _ratio(*log) for log in logs], mean


def _sums(ours: list[Record], theirs: list[Record], clock: str) -> dict[str, np.ndarray]:
    """Tokens and seconds of both sides by prompt, summed over the passes that both have."""
    left, right = (
        {r.block: (r.tokens, getattr(r, clock)) for r in own if r.seconds > 0}
        for own in (ours, theirs)
    )
    found: dict[str, np.ndarray] = {}
    for block in left.keys() & right.keys():
        found[block[0]] = found.get(block[0], np.zeros(4)) + np.array([*left[block], *right[block]])
    timed = sum(found.values(), np.zeros(4))
    return found if timed[1] > 0 and timed[3] > 0 else {}


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # a resample may miss all prompts of a setting; `interval` drops it
        ours, theirs = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
        return np.log(ours / theirs)


def _ratio(log: np.ndarray, resampled: np.ndarray) -> list[float]:
    return np.exp(interval(log, resampled)).tolist()
