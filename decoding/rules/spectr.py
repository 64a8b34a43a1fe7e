"""SpecTr: K-SEQ accepts one draw after another with the same law (Algorithm 3, NDE paper)."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from nde_talf.decoding.registry import IID
from nde_talf.decoding.rules.residual import Node, excess, ratio
from nde_talf.decoding.rules.sums import rows_at_once
from nde_talf.decoding.rules.walk import Rule, rule

TURNS = 20, 48
"""Steps of the search in many rows of float32, and of float64; any valid rho is lossless."""


class KSeq(NamedTuple):
    """SpecTr's state.

    Attributes:
        rho: draws are accepted with probability min(1, p / (rho q)).
        accepted: the probability that one of them is accepted.
        fraction: the part of min(p, rho q) that accepted draws take.
    """

    rho: Any = 1.0
    accepted: Any = 0.0
    fraction: Any = 1.0


@rule("spectr", IID, labels=True)
class SpecTr(Rule):
    """Accept draws one after another with min(1, p / (rho q)), for the smallest valid rho.

    Any rho in [rho*, k] is lossless and any below is biased, so rho is the upper end of its
    bracket.
    """

    by_count = True
    can_hit_draft = False  # at rho* the residual has no mass at any draw

    def start(self, node: Node) -> KSeq:
        """Return rho for the node's number of draws; it stays as it is."""
        if node.count == 1:
            return KSeq()  # speculative sampling; its acceptance is not asked for
        covered, exact = cache(partial_sums(node.p, node.q)), node.p.dtype == torch.float64
        return k_seq(*threshold(covered, node.count, exact), node.count)

    def chance(self, px: Any, qx: Any, state: KSeq, left: Any = None) -> Any:
        """Return min(1, p(x) / (rho q(x)))."""
        return ratio(px, state.rho * qx)

    def residual(self, node: Any, state: KSeq) -> Any:
        """Return (p - gamma min(p / rho, q))_+."""
        rho, _, fraction = state
        return (node.p - torch.minimum(node.p, rho * node.q).mul_(fraction)).clamp_(min=0)

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: KSeq) -> Tensor:
        """Return p_acc(rho) (Algorithm 8, whose second term is 0 at rho*)."""
        return states.accepted

    def table(self, p: Tensor, q: Tensor, draws: Tensor) -> KSeq:
        """Return the states [R, max(draws) + 1] by row and number of draws; see `Rule.table`."""
        if p.device.type == "cpu":
            return self._row_by_row(p, q, draws)
        shape = len(p), int(draws.max()) + 1
        states = KSeq(*(p.new_full(shape, value, dtype=torch.float64) for value in KSeq()))
        for k in range(1, shape[1]):
            for rows in (draws >= k).nonzero()[:, 0].split(rows_at_once(p)):
                for field, value in zip(states, k_seqs(p[rows], q[rows], k), strict=True):
                    field[rows, k] = value
        return states

    def _row_by_row(self, p: Tensor, q: Tensor, draws: Tensor) -> KSeq:
        """Search row by row: a large one stays in the cache for all its searches."""
        states = np.tile(np.array(KSeq())[:, None, None], (1, len(p), int(draws.max()) + 1))
        for row, count in enumerate(draws.tolist()):
            covered = cache(partial_sums(p[row], q[row]))
            for k in range(1, count + 1):
                states[:, row, k] = k_seq(*threshold(covered, k, p.dtype == torch.float64), k)
        return KSeq(*torch.from_numpy(states))


def k_seqs(p: Tensor, q: Tensor, k: int) -> KSeq:
    """Return the states for k draws at rows of p, q [R, V], by halving the bracket [1, k]."""

    def sums(rho: Tensor) -> Tensor:
        return (1 - excess(p, q, rho).sum(-1, dtype=torch.float64)).clamp(min=0)

    high = p.new_ones(len(p), dtype=torch.float64)
    covered = sums(high)
    valid = acceptance(high, covered, k) <= covered
    low, high = high, torch.where(valid, high, float(k))
    for _ in range(TURNS[p.dtype == torch.float64]):
        middle = (low + high) / 2
        covered = sums(middle)
        valid = acceptance(middle, covered, k) <= covered
        low, high = torch.where(valid, low, middle), torch.where(valid, middle, high)
    return k_seq(high, sums(high), k)


def partial_sums(p: Tensor, q: Tensor) -> Callable[[float], float]:
    """Return the function rho -> sum_t min(p, rho q) of one row."""
    return lambda rho: 1 - float(p.sub(q, alpha=rho).clamp_(min=0).sum())


def acceptance(rho: Any, covered: Any, k: int) -> Any:
    """Return p_acc = 1 - (1 - beta)^k with beta = covered / rho, to full relative precision."""
    beta = covered / rho
    if isinstance(beta, Tensor):
        return -torch.expm1(k * torch.log1p(-beta.clamp(max=1)))
    return beta if k == 1 else -math.expm1(k * math.log1p(-beta)) if beta < 1 else 1.0


def k_seq(rho: Any, covered: Any, k: int) -> KSeq:
    """Return the state at rho, where covered is sum_t min(p, rho q)."""
    accepted = acceptance(rho, covered, k)
    if isinstance(accepted, Tensor):
        return KSeq(rho, accepted, torch.where(covered > 0, (accepted / covered).clamp(max=1), 0.0))
    return KSeq(rho, accepted, min(accepted / covered, 1.0) if covered > 0 else 0.0)


def threshold(covered: Callable[[float], float], k: int, exact: bool) -> tuple[float, float]:
    """Return (rho, covered(rho)) with covered(x) = sum_t min(p, x q), for k draws at one node.

    rho* solves p_acc = covered (Algorithm 3). covered grows and p_acc falls, so that the root is
    found inside [1, k], and any rho above it is valid too.

    exact: to 1e-13 instead of 1e-5, which float32 rows allow.
    """

    def surplus(rho: float) -> float:
        total = covered(rho)
        return total - acceptance(rho, total, k)

    tolerance = 1e-13 if exact else 1e-5
    if surplus(1.0) >= 0:
        return 1.0, covered(1.0)
    # Where p and q hardly meet, rounding hides where the two sides cross: k is always valid.
    rho = float(k)
    if surplus(rho) > 0:
        root = brentq(surplus, 1.0, rho, xtol=tolerance, rtol=max(tolerance, 1e-15))
        above = min(root * (1 + 2 * tolerance), rho)
        rho = above if surplus(above) >= 0 else rho
    return rho, covered(rho)
