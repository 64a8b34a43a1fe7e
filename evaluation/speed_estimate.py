"""Speed of drafting from few numbers, before anything is trained.

`TimedPath` takes them from a path that was decoded.

`Prices` needs four, and assumes that every drafted token of a path is accepted with the same
chance; the draft's pass over a token takes `draft_price` of the target's; the target scores up to
`free_rows` tokens, of all sequences together, in the time of one, and more in proportion. Example:
with acceptance 0.5, a draft price of 0.25 and 8 free rows, one sequence drafts 1 token and decodes
1.5 / 1.25 = 1.2 times as fast.
"""

from bisect import bisect_left
from dataclasses import dataclass

LONGEST = 16
"""Tokens of the longest path tried."""


@dataclass(frozen=True)
class Prices:
    """The four numbers above.

    Attributes:
        acceptance: chance that a drafted token is accepted.
        draft_price: time of the draft's pass over a token, in passes of the target.
        free_rows: tokens that the target scores in the time of one.
    """

    acceptance: float
    draft_price: float
    free_rows: int

    def best_path(self, batch: int) -> tuple[int, float, float]:
        """Return the best length of a path, tokens per step, and speed-up over plain decoding."""
        plain = max(1.0, batch / self.free_rows)

        def gain(length: int) -> tuple[float, float]:
            tokens = sum(self.acceptance**depth for depth in range(length + 1))
            step = max(1.0, batch * (length + 1) / self.free_rows)
            return tokens * plain / (step + length * self.draft_price * plain), tokens

        best = max(range(LONGEST + 1), key=gain)
        speedup, tokens = gain(best)
        return best, tokens, speedup

    def first_without_gain(self) -> int:
        """Return the smallest batch for which no path is faster, at most `free_rows`."""

        def gains_nothing(batch: int) -> bool:
            return self.best_path(batch)[2] < 1 + 1e-9

        return 1 + bisect_left(range(1, self.free_rows), True, key=gains_nothing)


@dataclass(frozen=True)
class TimedPath:
    """Figures of a decoded path, which give the speed of every shorter one.

    Attributes:
        length: drafted tokens of a step.
        acceptance: fraction of steps that accepted a token at each position.
        plain: seconds of a step of plain decoding.
        draft: seconds of drafting a token.
        step: seconds of the other parts of a step.
    """

    length: int
    acceptance: list[float]
    plain: float
    draft: float
    step: float

    def gain(self, length: int) -> float:
        """Return the speed-up of a path over plain decoding.

        The target's part of a step grows evenly with the length, from plain decoding's.
        """
        step = self.plain + (self.step - self.plain) * length / self.length + length * self.draft
        return (1 + sum(self.acceptance[:length])) * self.plain / step

    @property
    def best(self) -> int:
        """The fastest length; 0 for plain decoding."""
        return max(range(self.length + 1), key=self.gain)
