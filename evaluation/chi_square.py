"""Pearson's chi-square test of samples against a known law, and the bias that it would find."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

EXPECTED = 5.0
"""Outcomes that are expected less often are counted together."""
LEVEL = 1e-6
"""Probability of an alarm about samples that do follow the law."""


def bins(law: Mapping[Hashable, float], samples: int) -> dict[Hashable, int]:
    """Return by outcome the number of its bin: one of its own, or the last for the rare ones.

    Rare outcomes are expected less than `EXPECTED` times. Where they are expected less than that
    even together, they share the last bin of an outcome.
    """
    common = [outcome for outcome, chance in law.items() if chance * samples >= EXPECTED]
    rest = sum(chance for chance in law.values() if chance * samples < EXPECTED)
    last = len(common) if rest * samples >= EXPECTED else max(0, len(common) - 1)
    return dict.fromkeys(law, last) | {outcome: index for index, outcome in enumerate(common)}


def p_value(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """Return how probable samples of `law` are to be as far from it as `counts`, or farther.

    Far means the sum of (observed - expected)² / expected over the bins, which follows chi-square.
    0 for an impossible outcome.

    Args:
        counts: outcome -> how often.
        law: outcome -> probability above 0.
    """
    if counts.keys() - law.keys():
        return 0.0
    samples = sum(counts.values())
    number = bins(law, samples)
    at = [number[outcome] for outcome in law]
    observed = np.bincount(at, [counts.get(outcome, 0) for outcome in law])
    expected = np.bincount(at, [samples * chance for chance in law.values()])
    degrees = len(expected) - 1
    far = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(far, degrees)) if degrees else 1.0


def smallest_bias(samples: int, law: Mapping[Any, float]) -> float:
    """Return the total variation (between bins) that gives the alarm with probability 0.99.

    Whatever the bias' shape: under a law p + d the statistic is about noncentral chi-square, with
    noncentrality n sum(d² / p) >= n (sum |d|)² = 4 n TV² (Cauchy and Schwarz).
    """
    degrees = max(bins(law, samples).values())
    if not degrees:
        return 1.0
    limit = chi2.isf(LEVEL, degrees)
    needed = brentq(lambda excess: ncx2.sf(limit, degrees, excess) - 0.99, 1e-6, 1e5)
    return float(min(1.0, (needed / (4 * samples)) ** 0.5))
