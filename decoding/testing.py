"""Prove that a rule or a policy is lossless: run it once for every outcome of its draws.

    from nde_talf.decoding.testing import exact_law

    law = exact_law(lambda rng: (rng.bernoulli(0.25), rng.bernoulli(0.5)))
    assert law[True, True] == 0.125

`law` maps every outcome to its probability. docs/prove_a_rule.md is a full example with a rule of
your own.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from nde_talf.decoding.sampling.rng import Rng

T = TypeVar("T")


class EnumeratedRng(Rng):
    """Stands in for `nde_talf.decoding.sampling.rng.Rng`: replays a script of decisions.

    It continues with the first outcome of each new one.

    Attributes:
        probability: of all decisions so far.
        taken: (choice, number of outcomes) of each decision.
    """

    def __init__(self, script: Sequence[int]):
        self.script, self.taken = list(script), list[tuple[int, int]]()
        self.probability = 1.0

    def _decide(self, outcomes: Iterable[tuple[int, float]]) -> int:
        possible = [each for each in outcomes if each[1] > 0]
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else 0
        outcome, probability = possible[choice]
        self.taken.append((choice, len(possible)))
        self.probability *= probability
        return outcome

    def bernoulli(self, probability: float) -> bool:
        """Decide as `Rng.bernoulli`."""
        probability = min(max(probability, 0.0), 1.0)
        return bool(self._decide([(1, probability), (0, 1 - probability)]))

    def categorical(self, weights: Tensor, at: Sequence[int] | None = None) -> Any:
        """Draw as `Rng.categorical`."""
        if at is not None:
            return [self.categorical(weights[row]) for row in at]
        values = weights.double()
        return self._decide(enumerate((values / values.sum()).tolist()))

    def ahead(self, count: int) -> list[float]:
        """Return as many numbers, on which nothing depends: `pick` decides."""
        return [0.0] * count

    def rows(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Draw from each row of `weights` [n, V] now."""
        return torch.tensor([self.categorical(row) for row in weights])

    def pick(self, token: int, weights: Tensor) -> int:
        """Draw from `weights` [V] when the token is needed."""
        return int(self.categorical(weights))


def outcomes(experiment: Callable[[Any], T]) -> Iterator[tuple[T, float]]:
    """Yield (outcome, probability) of `experiment(rng)` for every sequence of its decisions."""
    script: list[int] = []
    while True:
        rng = EnumeratedRng(script)
        yield experiment(rng), rng.probability
        taken = rng.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [choice for choice, _ in taken]
        script[-1] += 1


def exact_law(experiment: Callable[[Any], Hashable]) -> dict[Hashable, float]:
    """Return the law of `experiment(rng)`, which draws from `rng` alone and ends, by outcome."""
    law: dict[Hashable, float] = defaultdict(float)
    for outcome, probability in outcomes(experiment):
        law[outcome] += probability
    return dict(law)


def expectation(experiment: Callable[[Any], float]) -> float:
    """Return the expected value of `experiment(rng)`."""
    return sum(value * probability for value, probability in outcomes(experiment))
