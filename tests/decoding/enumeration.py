"""Exact laws by running the real code once for every outcome of its random decisions."""

from collections import defaultdict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class EnumeratedCoins:
    """Stands in for `Coins`: replays a script of decisions and extends it by the first outcome of each new one."""

    def __init__(self, script: list[int]):
        self.script, self.taken = script, []  # taken: [(choice, [(outcome, probability), ...]), ...]
        self.probability = 1.0

    def _decide(self, outcomes: list[tuple[int, float]]) -> int:
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else 0
        outcome, probability = outcomes[choice]
        self.taken.append((choice, len(outcomes)))
        self.probability *= probability
        return outcome

    def accept(self, probability: float) -> bool:
        probability = min(max(probability, 0.0), 1.0)
        outcomes = [(value, chance) for value, chance in ((1, probability), (0, 1 - probability)) if chance > 0]
        return bool(self._decide(outcomes))

    def draw(self, weights: Tensor) -> int:
        values = weights.double()
        values = (values / values.sum()).tolist()
        return self._decide([(index, value) for index, value in enumerate(values) if value > 0])

    def draws(self, rows: list[Tensor]) -> list[int]:
        return [self.draw(row) for row in rows]

    def accepts(self, probabilities: Tensor) -> Tensor:
        return torch.tensor([self.accept(probability) for probability in probabilities.tolist()])

    def tokens(self, rows: Tensor) -> Tensor:
        return torch.tensor([self.draw(row) for row in rows])


def exact_law(experiment: Callable[[EnumeratedCoins], Hashable]) -> dict[Hashable, float]:
    """Probability of every outcome of `experiment(coins)`."""
    law: dict[Hashable, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        coins = EnumeratedCoins(script)
        outcome = experiment(coins)
        law[outcome] += coins.probability
        script = [choice for choice, _ in coins.taken]
        while script and script[-1] + 1 == coins.taken[len(script) - 1][1]:
            script.pop()
        if script:
            script[-1] += 1
        else:
            script = None
    return dict(law)


def expectation(experiment: Callable[[EnumeratedCoins], float]) -> float:
    """Expected value of `experiment(coins)`."""
    total, script = 0.0, []
    while True:
        coins = EnumeratedCoins(script)
        total += experiment(coins) * coins.probability
        script = [choice for choice, _ in coins.taken]
        while script and script[-1] + 1 == coins.taken[len(script) - 1][1]:
            script.pop()
        if not script:
            return total
        script[-1] += 1
