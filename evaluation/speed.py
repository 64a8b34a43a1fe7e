"""Speed-ups: ratios of total tokens/s, paired by prompt, with bootstrap intervals.

Pure functions of records.

The one place where a speed-up is computed; see `nde_talf.evaluation.protocol` for what it means.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from nde_talf.decoding.common.bootstrap import interval, samples
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.methods import TITLES, selector_title

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
    """`speed_ratio` of every pair (one a setting), and the geometric mean of those that there are
    (None below two).

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


def selectors_versus(records: list[Record], selectors: dict[str, Iterable[str]]) -> dict[str, dict]:
    """Every selector (by its name; values: the verifiers it chooses among) against the best static
    trees of all of them, of Traversal's, and the cheap rules, as far as there are records.
    """
    names = {record.method for record in records}
    others = {}
    for rule in dict.fromkeys((*(rule for own in selectors.values() for rule in own), "traversal")):
        title = TITLES[rule]
        trees = {name for name in names if name.startswith(f"{title} (")}
        others |= {
            f"{title}, best static": {name for name in trees if "τ" not in name},
            f"{title}, L1 = previous τ − 1": {name for name in trees if "τ" in name},
            f"{title}, by entropy": {f"{title}, by entropy"} & names,
            f"{title}, by domain": {f"{title}, by domain"} & names,
        }
    others = {label: own for label, own in others.items() if own}
    return {
        title: versus(records, title, others)
        for title in map(selector_title, selectors)
        if title in names
    }


def versus(
    records: list[Record], method: str, others: dict[str, set[str]]
) -> dict[str, dict[str, list[float]]]:
    """For each of `others`, by sampling setting: [ratio, low, high] of the total tokens/s of
    `method` to that of the other, which may have another name under every setting (a static
    method's name holds its tree).

    MEAN is the geometric mean over the settings.
    """
    found = {}
    settings = list(dict.fromkeys(record.setting for record in records))
    for other, names in others.items():
        here = [[record for record in records if record.setting == setting] for setting in settings]
        pairs = [
            ([r for r in own if r.method == method], [r for r in own if r.method in names])
            for own in here
        ]
        ratios, mean = speed_ratios(pairs)
        if own := {
            setting: ratio for setting, ratio in zip(settings, ratios, strict=True) if ratio
        }:
            found[other] = own | ({MEAN: mean} if mean else {})
    return found
