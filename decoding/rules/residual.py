"""Residuals of p after rejected draws, and one node of a tree as rules see it.

SpecInfer, Naive and Traversal share one family of residuals, what is left of p after rejections:
(w0 p - c q)_+ / z. Its functions take numbers of one node, or tensors of many.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.sampling.rng import LEAST_MASS, Rng
from nde_talf.decoding.tree import DraftTree

EMPTY = 1e-12
"""A residual with less mass than this is rounding noise (p = q), and the token is drawn from p."""


_LONG = 1 << 12  # numbers of a row from which on a sum in float64 is slow


class Residual(NamedTuple):
    """Residual of p after some rejections.

    w0 in [0, 1] is the weight that the node is reached with: 1 for top-down rules.

    Attributes:
        c: the residual's coefficient.
        z: its mass, sum_t (w0 p(t) - c q(t))_+.
        d: z + 1 - w0.
    """

    c: Any = 0.0
    z: Any = 1.0
    d: Any = 1.0


def accept(px: Any, qx: Any, state: Residual, w0: Any = 1.0, left: float | None = None) -> Any:
    """Probability that the next draw x is accepted: min(1, (w0 p(x) - c q(x))_+ / (d q(x))).

    left: for a draw without replacement, the mass of q that it was drawn from, which divides q(x).
    Below `LEAST_MASS` there was nothing to draw from, so that the draw is never accepted.
    """
    mass = w0 * px - state.c * qx
    if left is None:
        return ratio(mass, state.d * qx)
    return ratio(mass, state.d * qx / left) if left >= LEAST_MASS else 0.0


def reject(node: Any, state: Residual, w0: Any = 1.0, left: float | None = None) -> Residual:
    """Return the state after one more rejected draw, a repeated one too.

    c' = c + d, z' = sum_t (w0 p - c' q)_+, d' = z' + 1 - w0. Without replacement c' = c + d / left
    (Appendix A.3, DySpec paper).
    """
    step = state.d
    if left is not None:
        if left < LEAST_MASS:
            return state
        step = step / left
    c = state.c + step
    z = node.mass(c, w0)
    return Residual(c, z, z + 1 - w0)


def excess(p: Tensor, q: Tensor, c: Any) -> Tensor:
    """Return (p - c q)_+ of a row [V], of rows [R, V] or of numbers at single tokens.

    c: a number, or a tensor: of rows [R]. Where it is the number 0 this is p itself.
    """
    if not isinstance(c, Tensor):
        return p if c == 0 else p.sub(q, alpha=c).clamp_(min=0)
    if p.dim() > c.dim():
        c = c.to(p)[..., None]
    return (p - c * q).clamp_(min=0)


def ratio(numerator: Any, denominator: Any) -> Any:
    """Return min(1, numerator_+ / denominator) of numbers or tensors.

    It is 1 where the denominator vanishes under a positive numerator.
    """
    if isinstance(numerator, Tensor):
        numerator = numerator.clamp(min=0)
        sure = (numerator > 0).to(numerator)
        return torch.where(numerator >= denominator, sure, numerator / denominator)
    return 0.0 if numerator <= 0 else 1.0 if numerator >= denominator else numerator / denominator


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose as torch.where does, for numbers too."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def total(row: Tensor) -> float:
    """Return the sum of a row [V].

    torch adds pairwise, so a long row of float32 loses no more than its own rounding, in a fifth of
    the time of float64.
    """
    return float(row.sum(dtype=None if row.shape[0] >= _LONG else torch.float64))


class Node:
    """One node of a tree.

    Args:
        p: row [V], or numbers by drafted token.
        q: the same, or what gives a probability by token and the row by `dense()`
            (`gbv.TiltedRow`).
        drafted: its draws in draft order, with repeats.
        left: for draws without replacement, the mass of q that each was drawn from
            (`DraftTree.masses`).
    """

    def __init__(self, p: Any, q: Any, drafted: list[int], left: list[float] | None = None):
        self.p, self._q, self.drafted, self.left, self.count = p, q, drafted, left, len(drafted)

    @cached_property
    def q(self) -> Any:
        """The draft's row [V]."""
        return self._q if isinstance(self._q, Tensor) or self._q is None else self._q.dense()

    def px(self, draw: int) -> float:
        """Return p of a draw."""
        return float(self.p[self.drafted[draw]])

    def qx(self, draw: int) -> float:
        """Return q of a draw."""
        return float(self._q[self.drafted[draw]])

    def mass(self, c: float, w0: float = 1.0) -> float:
        """Return sum_t (w0 p(t) - c q(t))_+ = w0 sum_t (p(t) - c / w0 q(t))_+."""
        return w0 * total(self.rest(c, w0))

    def rest(self, c: float, w0: float = 1.0) -> Tensor:
        """Return weights [V] in proportion to (w0 p - c q)_+.

        Where c / w0 is no float32 number there are none, to its rounding.
        """
        return excess(self.p, self.q, min(c / w0, 1e37))

    def draw(self, weights: Tensor, rng: Rng, w0: float = 1.0) -> int:
        """Draw a token from `weights`, or from p where w0 times these are rounding noise."""
        noise = weights is not self.p and w0 * total(weights) <= EMPTY
        return rng.categorical(self.p if noise else weights)


def node_of(tree: DraftTree, number: int, without_replacement: bool = False) -> Node:
    """Return node `number` of a tree, looked at number by number."""
    drafted = [tree.tokens[child] for child in tree.children[number]]
    left = tree.masses(number) if without_replacement else None
    return Node(tree.p[number], tree.q[number], drafted, left)
