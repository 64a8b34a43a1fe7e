"""Figures that carry their bootstrap samples, so that means and ratios of them are plain NumPy.

A `Samples` is an array [1 + RESAMPLES]: the figure, then its value in every bootstrap sample.
Example: the mean ratio of two methods over several settings, each a `Samples`, is

    as_text(as_interval(np.mean([ours / theirs for ours, theirs in pairs], 0)))  # "1.07 [1.02,
    1.13]"
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np

from nde_talf.data.text.prompts import Prompt
from nde_talf.decoding.common.bootstrap import RESAMPLES, interval, samples, shown

Samples = np.ndarray
FEW = 3  # prompts of a set, below which resampling them says nothing: such a figure has no interval


class Prompts:
    """The prompts that count, and how often each one does in every bootstrap sample.

    The prompts of a set are resampled among themselves; one sample counts for all methods and all
    sampling settings, so that ratios are paired.

    Attributes:
        every: in the order in which they are measured.
        row: of each, by id.
        sets: the kinds of prompts.
    """

    def __init__(self, every: Sequence[Prompt]):
        self.every = list(every)
        self.row = {prompt.id: row for row, prompt in enumerate(self.every)}
        kinds = np.array([prompt.kind for prompt in self.every])
        self.sets = sorted(set(kinds.tolist()))
        self._rows = {kind: np.flatnonzero(kinds == kind) for kind in self.sets}
        self._weights = np.ones((1 + RESAMPLES, len(self.every)))
        for number, rows in enumerate(self._rows.values()):
            drawn = samples(len(rows), number)
            counts = np.stack([(drawn == i).sum(1) for i in range(len(rows))], -1)
            self._weights[1:, rows] = counts if len(rows) >= FEW else np.nan

    @classmethod
    def in_turn(cls, every: Iterable[Prompt], count: int | None = None) -> "Prompts":
        """`count` prompts of every set, or all, the sets in turn, so that what was interrupted has
        as many of each.
        """
        by_set: dict[str, list[Prompt]] = {}
        for prompt in every:
            by_set.setdefault(prompt.kind, []).append(prompt)
        turns = zip_longest(*(own[:count] for own in by_set.values()))
        return cls([prompt for turn in turns for prompt in turn if prompt is not None])

    def __str__(self) -> str:
        """ "6 prompts (code 3, prose 3)"."""
        sets = ", ".join(f"{kind} {len(rows)}" for kind, rows in self._rows.items())
        return f"{len(self.every)} prompt{'s' * (len(self.every) != 1)}" + (
            f" ({sets})" if sets else ""
        )

    def ratio(self, above: np.ndarray, below: np.ndarray, kind: str | None = None) -> Samples:
        """Sum of `above` over sum of `below`, each [prompts, ...], over one set of prompts or all:
        [1 + RESAMPLES, ...].
        """
        rows = np.arange(len(self.every)) if kind is None else self._rows[kind]
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self._weights[:, rows] @ above[rows]) / (self._weights[:, rows] @ below[rows])


def as_interval(figure: Samples | None) -> list[float] | None:
    """[value, low, high] of a figure, with a 95 % interval; [value] where the prompts are too few
    for one; None if it was not measured.
    """
    if figure is None or not np.isfinite(figure[0]):
        return None
    found = interval(figure[0], figure[1:])
    return found if np.isfinite(found[1:]).all() else found[:1]


def as_text(found: list[float] | None, digits: int = 2) -> str:
    """ "1.07 [1.02, 1.13]", "1.07", or nothing for what was not measured."""
    return (
        "" if not found else shown(found, digits) if len(found) == 3 else f"{found[0]:.{digits}f}"
    )


def mean(figures: Sequence[Samples | None]) -> Samples | None:
    """The mean of those figures that were measured."""
    found = [figure for figure in figures if figure is not None and np.isfinite(figure[0])]
    return np.mean(found, 0) if found else None


def ratio(ours: Samples | None, theirs: Samples | None) -> Samples | None:
    """One figure over another; None if one of them was not measured."""
    return None if ours is None or theirs is None else ours / theirs
