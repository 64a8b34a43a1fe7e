"""95 % bootstrap intervals of figures over prompts, which are resampled whole: pure functions of numbers."""

from collections.abc import Callable

import numpy as np

RESAMPLES = 2000


def draws(count: int, seed: int = 0) -> np.ndarray:
    """Places [RESAMPLES, count] of resampled prompts. Figures of the same prompts use one seed, so that both sides of a ratio
    are resampled together."""
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def interval(value: float, resampled: np.ndarray) -> list[float]:
    """[value, low, high] from the figure itself and its resampled values; those that are not finite are left out."""
    kept = resampled[np.isfinite(resampled)]
    return [float(value), *np.quantile(kept if len(kept) else [np.nan], [0.025, 0.975]).tolist()]


def of_sums(values: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """[value, low, high] of `figure`, a function of sums [..., m] over the prompts of `values` [prompts, m]."""
    return interval(figure(values.sum(0)), figure(values[draws(len(values))].sum(1)))


def shown(values: list[float] | None, digits: int = 2) -> str:
    """ "1.42 [1.31, 1.55]"; a dash for what was not measured."""
    if not values:
        return "–"
    value, low, high = (f"{x:.{digits}f}" for x in values)
    return f"{value} [{low}, {high}]"


def times(values: list[float] | None) -> str:
    """A speed-up: "1.42× [1.31, 1.55]"."""
    if not values:
        return "–"
    value, low, high = values
    return f"{value:.2f}× [{low:.2f}, {high:.2f}]"
