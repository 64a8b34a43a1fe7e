"""Prices of all trees on a grid of contexts, computed once from a latency table."""

from typing import TypeVar

import torch
from torch import Tensor

from nde_talf.selector.prices import LatencyTable

SPACING = 16
"""Tokens between priced contexts."""
LONGEST = 1 << 14
"""Longest context that a decoder prices."""
Context = TypeVar("Context", Tensor, int)


class StepCosts:
    """A table's prices of the 233 trees under a verifier, every `SPACING` tokens of context.

    seconds: [G, A] float32, up to `longest` tokens; passes: [G, 2], see `LatencyTable.passes`.
    `rule`: "table", or "eq11" for the NDE paper's.
    """

    def __init__(self, table: LatencyTable, verifier: str, longest: int, rule: str = "table"):
        self.table, self.verifier, self.rule = table, verifier, rule
        contexts = grid_context(torch.arange(-(-longest // SPACING) + 2))
        self.seconds = self._price(contexts).float()
        self.passes = table.passes(contexts).float()

    def _price(self, contexts: Tensor) -> Tensor:
        if self.rule == "eq11":
            return self.table.steps_eq11(contexts)
        return self.table.steps(contexts, self.verifier)

    def at(self, context: Tensor) -> Tensor:
        """Return seconds [R, A] at `context` [R], clamped to `longest`."""
        return self.seconds[self.row(context)]

    def row(self, context: Context) -> Context:
        """Return the index of the nearest context of the grid."""
        nearest = (context + SPACING // 2) // SPACING
        last = len(self.seconds) - 1
        return nearest.clamp(max=last) if isinstance(nearest, Tensor) else min(nearest, last)

    def mean(self, counts: Tensor) -> Tensor:
        """Return mean seconds [A] over the contexts in `context_counts`, however long."""
        seen = counts.nonzero()[:, 0]
        return counts[seen].double() @ self._price(grid_context(seen)) / counts.sum()


def grid_context(row: Tensor) -> Tensor:
    """Return the context at which row number `row` of `StepCosts` is priced."""
    return (SPACING * row).clamp(min=1)


def context_counts(context: Tensor) -> Tensor:
    """Count the contexts [R] nearest to each row of the grid: [G]."""
    return ((context + SPACING // 2) // SPACING).bincount()
