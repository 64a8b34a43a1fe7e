"""The family of residuals (w0 p - c q)_+ / z that SpecInfer, Naive and Traversal share.

A residual is what is left of p after rejections. The functions take numbers of one node, or
tensors of many.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.sampling import LEAST_MASS

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


def reject(
    node: Any, state: Residual, w0: Any = 1.0, left: float | None = None, last: bool = False
) -> Residual:
    """Return the state after one more rejected draw, a repeated one too.

    c' = c + d, z' = sum_t (w0 p - c' q)_+, d' = z' + 1 - w0. Without replacement c' = c + d / left
    (Appendix A.3, DySpec paper). last: no draw follows, so that z' is not asked for.
    """
    step = state.d
    if left is not None:
        if left < LEAST_MASS:
            return state
        step = step / left
    c = state.c + step
    if last:
        return Residual(c, None, None)
    z = node.mass(c, w0)
    return Residual(c, z, z + 1 - w0)


def excess(p: Tensor, q: Tensor, c: Any, w0: Any = 1.0) -> Tensor:
    """Return (w0 p - c q)_+ of a row [V], of rows [R, V] or of numbers at single tokens.

    c: a number, with w0 = 1, or a tensor: of rows [R]. Where it is the number 0 this is p itself.
    """
    if not isinstance(c, Tensor):
        return p if c == 0 else p.sub(q, alpha=c).clamp_(min=0)
    if p.dim() > c.dim():
        c, w0 = (x.to(p)[..., None] if isinstance(x, Tensor) else x for x in (c, w0))
    return (w0 * p - c * q).clamp_(min=0)


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
