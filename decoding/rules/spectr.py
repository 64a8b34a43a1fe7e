"""SpecTr: K-SEQ, the rule that accepts one draw after another with the same law, and the search for
its threshold rho (Algorithm 3, NDE paper).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.rules.reduce import rows_at_once
from nde_talf.decoding.rules.rules import LabelRows, Node, Nodes, Rule, excess, ratio, where


class KSeq(NamedTuple):
    """SpecTr's state.

    Attributes:
        rho: draws are accepted with probability min(1, p / (rho q)).
        accepted: the probability that one of them is accepted.
        fraction: the part of min(p, rho q) that accepted draws take.
    """

    rho: Any
    accepted: Any
    fraction: Any


class SpecTr(Rule):
    """K-SEQ (Algorithm 3, NDE paper): accept draws one after another with min(1, p / (rho q)), for
    the smallest valid rho.

    Any rho in [rho*, k] is lossless and any below is biased, so rho is the upper end of its
    bracket.
    """

    by_count = True

    @property
    def lands(self) -> bool:
        """At rho* the residual has no mass at any draw."""
        return False

    def start(self, node: Any) -> KSeq:
        if isinstance(node, Node) and node.count == 1:
            return KSeq(1.0, 0.0, 1.0)  # speculative sampling; its acceptance is not asked for
        if isinstance(node, Node):
            k, exact = float(node.count), node.p.dtype == torch.float64
            rho, sum_of = threshold(
                partial_sums(node.p, node.q, torch.empty_like(node.p)), k, exact
            )
            return k_seq(rho, sum_of, k)
        k = node.count.clamp(min=1).double()

        def covered(rho: Tensor) -> Tensor:
            return (1 - excess(node.p, node.q, rho).sum(-1, dtype=torch.float64)).clamp(min=0)

        return k_seq(*threshold(covered, k, node.p.dtype == torch.float64, torch.ones_like(k)), k)

    def table(self, p: Tensor, q: Tensor, draws: Tensor) -> KSeq:
        """One row after the other: one of a large vocabulary stays in the cache until its rho are
        found.

        On a device many rows at once, as one by one the host would wait for it some ten times a row
        and k.
        """
        if p.device.type != "cpu":
            return self._table_on_device(p, q, draws)
        most, scratch = int(draws.max()), torch.empty_like(p[0])
        fields = np.tile(np.array(KSeq(1.0, 0.0, 1.0))[:, None, None], (1, len(p), most + 1))
        rows = (draws > 0).nonzero()[:, 0]
        at_one = (1 - LabelRows(p, q, rows, draws[rows]).mass(1.0)).tolist()
        for row, count, own in zip(rows.tolist(), draws[rows].tolist(), at_one, strict=True):
            covered = partial_sums(p[row], q[row], scratch)
            for k in range(1, count + 1):
                rho, taken = (
                    threshold(covered, float(k), p.dtype == torch.float64, at_one=own)
                    if k > 1
                    else (1.0, own)
                )
                fields[:, row, k] = k_seq(rho, taken, k)
        return KSeq(*torch.from_numpy(fields).to(p.device))

    def _table_on_device(self, p: Tensor, q: Tensor, draws: Tensor) -> KSeq:
        found = KSeq(
            *(
                p.new_full((len(p), int(draws.max()) + 1), value, dtype=torch.float64)
                for value in (1.0, 0.0, 1.0)
            )
        )
        for k in range(1, found.rho.shape[1]):
            for rows in (draws >= k).nonzero()[:, 0].split(rows_at_once(p)):
                node = Nodes(p[rows], q[rows], draws[rows, None], torch.full_like(rows, k))
                for field, value in zip(found, self.start(node), strict=True):
                    field[rows, k] = value
        return found

    def chance(self, px: Any, qx: Any, state: KSeq, left: Any = None) -> Any:
        return ratio(px, state.rho * qx)

    def residual(self, node: Any, state: KSeq) -> Any:
        rho, _, fraction = (x.to(node.p)[:, None] if isinstance(x, Tensor) else x for x in state)
        return (node.p - torch.minimum(node.p, rho * node.q).mul_(fraction)).clamp_(min=0)

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: KSeq) -> Tensor:
        """p_acc(rho) (Algorithm 8, whose second term is 0 at rho*)."""
        return states.accepted


def partial_sums(p: Tensor, q: Tensor, scratch: Tensor) -> Callable[[float], float]:
    """Rho -> sum_t min(p, rho q) of one row; scratch [V] is overwritten."""
    return lambda rho: 1 - float(torch.sub(p, q, alpha=rho, out=scratch).clamp_(min=0).sum())


def acceptance(rho: Any, covered: Any, k: Any) -> Any:
    """p_acc = 1 - (1 - beta)^k with beta = covered / rho, to full relative precision."""
    beta = covered / rho
    if isinstance(beta, Tensor):
        return -torch.expm1(k * torch.log1p(-beta.clamp(max=1)))
    return beta if k == 1 else -math.expm1(k * math.log1p(-beta)) if beta < 1 else 1.0


def k_seq(rho: Any, covered: Any, k: Any) -> KSeq:
    accepted = acceptance(rho, covered, k)
    if isinstance(accepted, Tensor):
        return KSeq(rho, accepted, torch.where(covered > 0, (accepted / covered).clamp(max=1), 0.0))
    return KSeq(rho, accepted, min(accepted / covered, 1.0) if covered > 0 else 0.0)


# of the search on a device, where it cannot stop early; any rho that it has found valid by then is
# lossless
TURNS = 12


def threshold(
    covered: Callable[[Any], Any], k: Any, exact: bool = False, one: Any = 1.0, at_one: Any = None
) -> tuple[Any, Any]:
    """(rho, covered(rho)) with covered(x) = sum_t min(p, x q), for k draws: numbers of one node or
    tensors [B].

    rho* solves p_acc = covered (Algorithm 3), that is x = g(covered(x)) where g(b) = b / (1 - (1 -
    b)^(1/k)). covered grows and g falls, so g(covered(1)) is an upper bound. A secant on
    g(covered(x)) - x inside the bracket takes about four reductions.

    Args:
        exact: to 1e-13 instead of 1e-5, which float32 rows allow.
        one: 1, or ones [B].
        at_one: covered(1), where it is known.
    """
    many, tolerance = isinstance(one, Tensor), 1e-13 if exact else 1e-5

    def g(b: Any) -> Any:
        if many:
            b = b.clamp(1e-300, 1 - 2**-53)
            return b / -torch.expm1(torch.log1p(-b) / k)
        b = min(max(b, 1e-300), 1 - 2**-53)
        return b / -math.expm1(math.log1p(-b) / k)

    best = covered(one) if at_one is None else at_one
    found = acceptance(one, best, k) <= best
    if not many and found:
        return one, best
    low, last, ahead, done = one, one, g(best) - 1, found
    high = where(found, one, _smaller((1 + ahead) * (1 + tolerance), k))
    x = where(found, one, 1 + (high - 1) / (0.7 + 0.3 * k))  # where it lies for typical rows
    for turn in range(TURNS if many else 100):
        b = covered(x)
        value, y = acceptance(x, b, k) - b, g(b) - x
        valid = value <= 0
        found = valid | (found & (x < high))
        low, high, best = (
            where(valid, low, x),
            where(valid, x, where(x < high, high, k)),
            where(valid, b, best),
        )
        narrow = high - low <= tolerance * high
        done = done | (
            found & (narrow | (valid & (value >= -tolerance) & (not exact)))
        )  # flat where p and q hardly differ
        if not many and done:
            break
        slope = (x - last) / (y - ahead) if many or y != ahead else math.inf
        guess = _smaller((x - y * slope) * (1 + tolerance), high)
        last, ahead = x, y
        x = where(done | narrow, high, where((low < guess) & (turn < 12), guess, (low + high) / 2))
    if many:
        rho = torch.where(found, high, k)
        return rho, covered(rho)
    # p and q hardly meet, and rounding hides where the two sides cross: k is always valid.
    return (high, best) if found else (k, covered(k))


def _smaller(a: Any, b: Any) -> Any:
    return torch.minimum(a, b) if isinstance(a, Tensor) else min(a, b)
