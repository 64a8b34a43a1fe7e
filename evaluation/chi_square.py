"""Pearson's chi-square test of samples against a known law, and its smallest detectable bias."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

EXPECTED = 5.0
"""Outcomes expected less often share a bin."""
LEVEL = 1e-6
"""Probability of a false alarm."""


def bins(law: Mapping[Hashable, float], samples: int) -> dict[Hashable, int]:
    """Return the bin of each outcome: one of its own, or the last, shared by rare outcomes.

    Rare outcomes are expected less than `EXPECTED` times. If that holds even for all of them
    together, they join the last bin of a common outcome.
    """
    common = [outcome for outcome, chance in law.items() if chance * samples >= EXPECTED]
    rest = sum(chance for chance in law.values() if chance * samples < EXPECTED)
    last = len(common) if rest * samples >= EXPECTED else max(0, len(common) - 1)
    return dict.fromkeys(law, last) | {outcome: index for index, outcome in enumerate(common)}


def p_value(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """Return the p-value of `counts` under `law`; 0 for an impossible outcome.

    The statistic is the sum of (observed - expected)² / expected over the bins, which follows
    chi-square.

    Args:
        counts: outcome -> count.
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
    """Return the total variation (between bins) that raises the alarm with probability 0.99.

    For every shape of the bias: under a law p + d the statistic is about noncentral chi-square,
    with noncentrality n sum(d² / p) >= n (sum |d|)² = 4 n TV² (Cauchy and Schwarz).
    """
    degrees = max(bins(law, samples).values())
    if not degrees:
        return 1.0
    limit = chi2.isf(LEVEL, degrees)
    needed = brentq(lambda excess: ncx2.sf(limit, degrees, excess) - 0.99, 1e-6, 1e5)
    return float(min(1.0, (needed / (4 * samples)) ** 0.5))
