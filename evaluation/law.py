"""Whether samples follow a known law: Pearson's chi-square test, and the smallest bias that it
would have found.
"""

from collections.abc import Hashable, Mapping

import torch

EXPECTED = 5.0
"""Outcomes that are expected less often are counted together."""
LEVEL = 1e-6
"""Probability of an alarm about samples that do follow the law."""


def bins(law: Mapping[Hashable, float], samples: int) -> dict[Hashable, int]:
    """By outcome the number of its bin: one of its own, or the last for those that are expected
    less than `EXPECTED` times.

    Where these are expected less than that even together, they share the last bin of an outcome.
    """
    own = [outcome for outcome, chance in law.items() if chance * samples >= EXPECTED]
    rest = sum(chance for chance in law.values() if chance * samples < EXPECTED)
    last = len(own) if rest * samples >= EXPECTED else max(0, len(own) - 1)
    return dict.fromkeys(law, last) | {outcome: index for index, outcome in enumerate(own)}


def p_value(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """Probability that samples of `law` (outcome -> probability above 0) are as far from it as
    `counts` (outcome -> how often) or farther: sum of (observed - expected)² / expected over the
    bins, which follows chi-square. 0 for an impossible outcome.
    """
    if counts.keys() - law.keys():
        return 0.0
    samples = sum(counts.values())
    number = bins(law, samples)
    count = max(number.values()) + 1
    observed, expected = torch.zeros(2, count, dtype=torch.float64)
    for outcome, chance in law.items():
        observed[number[outcome]] += counts.get(outcome, 0)
        expected[number[outcome]] += samples * chance
    return upper_tail(float(((observed - expected) ** 2 / expected).sum()), count - 1)


def upper_tail(statistic: float, degrees: float) -> float:
    """P(chi-square with so many degrees of freedom > statistic)."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1])) if degrees else 1.0


def critical(degrees: int, level: float) -> float:
    """The statistic above which the test gives the alarm."""
    return _bisected(lambda statistic: upper_tail(statistic, degrees) < level, 0.0, 1e6)


def smallest_bias(
    samples: int, law: Mapping[Hashable, float], level: float = LEVEL, power: float = 0.99
) -> float:
    """The total variation from which on a bias (between bins) gives the alarm with probability
    `power`, whatever its shape.

    Under a law p + d the statistic is about noncentral chi-square, with noncentrality n sum(d² / p)
    >= n (sum |d|)² = 4 n TV² (Cauchy and Schwarz). It is solved for the noncentrality that has the
    power.
    """
    degrees = max(bins(law, samples).values())
    limit = critical(degrees, level)
    needed = _bisected(
        lambda noncentrality: _noncentral_tail(limit, degrees, noncentrality) > power, 0.0, 1e5
    )
    return min(1.0, (needed / (4 * samples)) ** 0.5)


def _noncentral_tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """P(noncentral chi-square > statistic): a Poisson mixture of chi-squares."""
    mean = noncentrality / 2
    spread = 12 * mean**0.5 + 30
    terms = torch.arange(max(0, int(mean - spread)), int(mean + spread) + 1, dtype=torch.float64)
    weights = (
        terms * torch.tensor(max(mean, 1e-300), dtype=torch.float64).log()
        - mean
        - torch.lgamma(terms + 1)
    ).exp()
    tails = torch.special.gammaincc(
        (degrees + 2 * terms) / 2, torch.full_like(terms, statistic / 2)
    )
    return float((weights * tails).sum())


def _bisected(holds, low: float, high: float) -> float:
    """Where `holds` begins to be true of a number between `low` and `high`."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
