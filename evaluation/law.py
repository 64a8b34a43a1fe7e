"""Pearson's chi-square test of samples against a known law, and the bias that it would find."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

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
    observed, expected = torch.zeros(2, max(number.values()) + 1, dtype=torch.float64)
    for outcome, chance in law.items():
        observed[number[outcome]] += counts.get(outcome, 0)
        expected[number[outcome]] += samples * chance
    return upper_tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def upper_tail(statistic: float, degrees: float) -> float:
    """Return P(chi-square with so many degrees of freedom > statistic)."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves)) if degrees else 1.0


def critical(degrees: int, level: float) -> float:
    """Return the statistic above which the test gives the alarm."""
    return _first(lambda statistic: upper_tail(statistic, degrees) < level, 1e6)


def smallest_bias(samples: int, law: Mapping[Any, float]) -> float:
    """Return the total variation (between bins) that gives the alarm with probability 0.99.

    Whatever the bias' shape: under a law p + d the statistic is about noncentral chi-square, with
    noncentrality n sum(d² / p) >= n (sum |d|)² = 4 n TV² (Cauchy and Schwarz).
    """
    degrees = max(bins(law, samples).values())
    limit = critical(degrees, LEVEL)
    needed = _first(lambda excess: _noncentral_tail(limit, degrees, excess) > 0.99, 1e5)
    return min(1.0, (needed / (4 * samples)) ** 0.5)


def _noncentral_tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """Return P(noncentral chi-square > statistic): a Poisson mixture of chi-squares."""
    mean = max(noncentrality / 2, 1e-300)
    spread = 12 * mean**0.5 + 30
    terms = torch.arange(max(0, int(mean - spread)), int(mean + spread) + 1, dtype=torch.float64)
    weights = torch.distributions.Poisson(torch.tensor(mean, dtype=torch.float64)).log_prob(terms)
    halves = torch.full_like(terms, statistic / 2)
    return float((weights.exp() * torch.special.gammaincc(degrees / 2 + terms, halves)).sum())


def _first(holds: Callable[[float], bool], high: float) -> float:
    """Return where `holds` begins to be true of a number between 0 and `high`."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
