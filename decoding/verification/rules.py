"""The top-down rules. Each is written once and runs on numbers of one node or on tensors of many.

A rule is a solver f(p, q, X) of optimal transport with list information (section 3.2, NDE paper): given the draws X of a
node it returns a token whose law is p, and which is one of X as often as possible. It tries the draws one after another.
`chance` is the probability that the next one is accepted, `reject` gives the state after its rejection, and `residual` is what
the token is drawn from when none was accepted:

    state = rule.start(node)
    for each draw x in draft order:
        accept x with probability rule.chance(p(x), q(x), state)
        state = rule.reject(node, state)
    otherwise draw from rule.residual(node, state)

Three drivers use these four methods: `walk.solve` on the host, `walk.solve_rows` for the current nodes of many trees on a
device, and `branching.OfRule` for the branching probabilities that labels are made of. So all three use the same formulas.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoding.common.errors import UserError
from decoding.sampling import LEAST_MASS, Rng
from decoding.verification.reduce import hit_rates, positive_sums

Numbers = float | Tensor
EMPTY = 1e-12
"""A residual with less mass than this is rounding noise (p = q), and the token is drawn from p."""


def ratio(numerator: Any, denominator: Any) -> Any:
    """min(1, numerator_+ / denominator) of numbers or tensors; 1 where the denominator vanishes under a positive numerator."""
    if isinstance(numerator, Tensor):
        numerator = numerator.clamp(min=0)
        return torch.where(numerator >= denominator, (numerator > 0).to(numerator), numerator / denominator)
    return 0.0 if numerator <= 0 else 1.0 if numerator >= denominator else numerator / denominator


def where(condition: Any, yes: Any, no: Any) -> Any:
    """torch.where, or the same of numbers."""
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else (yes if condition else no)


def excess(p: Any, q: Any, c: Any, w0: Any = 1.0) -> Any:
    """(w0 p - c q)_+ of numbers at a token, of a row [V], or of rows [R, V] with a scalar or c, w0 [R] a row.

    Where c is the number 0 it returns p itself: the same distribution.
    """
    if not isinstance(p, Tensor):
        return max(w0 * p - c * q, 0.0)
    if not isinstance(c, Tensor):
        if c == 0:
            return p
        return (p.sub(q, alpha=c) if isinstance(w0, float) and w0 == 1 else (w0 * p).sub_(q, alpha=c)).clamp_(min=0)
    if p.dim() > c.dim():
        c, w0 = (x.to(p)[..., None] if isinstance(x, Tensor) else x for x in (c, w0))
    return (w0 * p - c * q).clamp_(min=0)


class Node:
    """One node on the host: p, q [V]; drafted: its draws in draft order, with repeats; left: for draws without replacement,
    the mass of q that each was drawn from (`DraftTree.masses`)."""

    def __init__(self, p: Tensor, q: Any, drafted: list[int], left: list[float] | None = None):
        self.p, self._q, self.drafted, self.left, self.count = p, q, drafted, left, len(drafted)

    @property
    def q(self) -> Any:
        """The row [V] of q; one that is costly to make (`gbv.TiltedRow`) is made here."""
        return self._q if isinstance(self._q, Tensor) or self._q is None else self._q.dense()

    def px(self, draw: int) -> float:
        return float(self.p[self.drafted[draw]])

    def qx(self, draw: int) -> float:
        return float(self._q[self.drafted[draw]])

    def mass(self, c: float, w0: float = 1.0) -> float:
        """Z = sum_t (w0 p(t) - c q(t))_+."""
        return float(excess(self.p, self.q, c, w0).sum(dtype=torch.float64))


class Nodes:
    """A node in each of B trees, on a device. p, q [B, V]; draws [B, n]: token ids in draft order, of which the first counts
    [B] are the node's own; left: float64 [B, n], or None for i.i.d. draws. q may be a function that makes the rows when they
    are first asked for."""

    def __init__(self, p: Tensor, q: Tensor | Callable[[], Tensor], draws: Tensor, counts: Tensor, left: Tensor | None = None):
        self.p, self._q, self.draws, self.count, self.left = p, q, draws, counts, left

    @property
    def q(self) -> Tensor:
        if not isinstance(self._q, Tensor):
            self._q = self._q()
        return self._q

    def px(self, draw: int) -> Tensor:
        return self.p.gather(-1, self.draws[:, draw, None])[:, 0].double()

    def qx(self, draw: int) -> Tensor:
        return self.q.gather(-1, self.draws[:, draw, None])[:, 0].double()

    def mass(self, c: Numbers, w0: Numbers = 1.0) -> Tensor:
        return excess(self.p, self.q, c, w0).sum(-1, dtype=torch.float64)


class LabelRows:
    """Rows number `rows` [M] of p, q [R, V], of which a chunk is held at a time; `count` [M] draws were made at each."""

    def __init__(self, p: Tensor, q: Tensor, rows: Tensor, count: Tensor):
        self.p, self.q, self.rows, self.count = p, q, rows, count

    def mass(self, c: Tensor | float, w0: Tensor | float = 1.0) -> Tensor:
        one = torch.ones(len(self.rows), dtype=torch.float64, device=self.p.device)
        return positive_sums(self.p, self.q, self.rows, w0 * one, c * one)


class Residual(NamedTuple):
    """The one-parameter family: what is left of p after some rejections is (w0 p - c q)_+ / z, for a scalar c.

    w0 in [0, 1] is the weight that the node is reached with: 1 for top-down rules. z is the residual's mass and d = z + 1 - w0.
    """

    c: Any = 0.0
    z: Any = 1.0
    d: Any = 1.0


def accept(px: Any, qx: Any, state: Residual, w0: Any = 1.0, left: Any = None) -> Any:
    """Probability that the next draw x is accepted: min(1, (w0 p(x) - c q(x))_+ / (d q(x))).

    left: for a draw without replacement, the mass of q that it was drawn from, which divides q(x). Below `LEAST_MASS` there was
    nothing to draw from, so that the draw is never accepted.
    """
    mass = w0 * px - state.c * qx
    if left is None:
        return ratio(mass, state.d * qx)
    scale = state.d * qx / (left.clamp(min=LEAST_MASS) if isinstance(left, Tensor) else max(left, LEAST_MASS))
    return where(left >= LEAST_MASS, ratio(mass, scale), 0.0)


def reject(node: Any, state: Residual, w0: Any = 1.0, left: Any = None, last: bool = False) -> Residual:
    """The state after one more rejected draw, a repeated one too: c' = c + d, z' = sum_t (w0 p - c' q)_+, d' = z' + 1 - w0.

    Without replacement c' = c + d / left (Appendix A.3, DySpec paper). last: no draw follows, so that z' is not asked for.
    """
    step = state.d
    if left is not None:
        if isinstance(left, float) and left < LEAST_MASS:
            return state
        step = where(left >= LEAST_MASS, step / left, 0.0)
    c = state.c + step
    if last:
        return Residual(c, None, None)
    z = node.mass(c, w0)
    return Residual(c, z, z + 1 - w0)


class Rule:
    """A solver.

    Attributes:
        offered: how many draws are offered at most; None: all of them.
        by_count: the state depends on how many draws a node has, and not on how many were rejected.
        lands: the token that is drawn from the residual may be one of the node's draws. Labels count such hits where this is
            True; False saves the time where the residual has no mass at any draw that was rejected.
    """

    offered: ClassVar[int | None] = None
    by_count: ClassVar[bool] = False

    @property
    def lands(self) -> bool:
        """See the attributes. True is always right."""
        return True

    def target(self, p: Tensor) -> Tensor:
        """What the token is drawn from at a leaf: p. `Greedy` checks it here."""
        return p

    def select(self, node: Any, rng: Rng) -> Any:
        """The node to be solved: Khisti first turns its draws into one draw from another law."""
        return node

    def start(self, node: Any) -> Any:
        """The state before the first draw."""
        return Residual()

    def chance(self, px: Any, qx: Any, state: Any, left: Any = None) -> Any:
        """The probability that the next draw x is accepted, given that all before it were rejected.

        Args:
            px, qx: p(x) and q(x); numbers on the host, [B] on a device, [B, S, K] for labels.
            state: what the rejections so far have left, as `start` and `reject` return it.
            left: for a draw without replacement, the mass of q that it was drawn from.
        """
        raise NotImplementedError

    def reject(self, node: Any, state: Any, left: Any = None, last: bool = False) -> Any:
        """The state after one more rejected draw. last: no draw follows, so what only the next one needs can be left out."""
        return state

    def residual(self, node: Any, state: Any) -> Any:
        """What the token is drawn from when no draw was accepted: weights, not normalised. They have the shape of node.p, which
        is a row [V], rows [B, V] or numbers at single tokens."""
        raise NotImplementedError

    def landing(self, px: Tensor, qx: Tensor, state: Any) -> Tensor:
        """The probability that a draw from the residual is the token with p(x), q(x); state.z is the residual's mass."""
        return (self.residual(SimpleNamespace(p=px, q=qx), state) / state.z.clamp(min=1e-30)).clamp(max=1)

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Any) -> Tensor:
        """Acceptance rates [R, max(draws) + 1] of rows of p, q [R, V] by number of i.i.d. draws."""
        raise NotImplementedError

    def table(self, p: Tensor, q: Tensor, draws: Tensor) -> Any:
        """The states at rows of p, q [R, V] that have up to draws [R] draws: each field a tensor [R, n], of which column j is
        the state after j rejections (`by_count`: with j draws)."""
        turns = int(draws.max()) if self.offered is None else min(self.offered, int(draws.max()))
        first = self.start(None)
        fields = [p.new_full((len(p), turns + 1), value, dtype=torch.float64) for value in first]
        for turn in range(1, turns + 1):
            rows = (draws >= turn).nonzero()[:, 0]
            before = type(first)(*(field[rows, turn - 1] for field in fields))
            after = self.reject(LabelRows(p, q, rows, draws[rows]), before)
            for field, value in zip(fields, after, strict=True):
                field[rows, turn] = value
        return type(first)(*fields)


class NSS(Rule):
    """Naive speculative sampling (Algorithm 1, NDE paper): t ~ p, whatever was drafted.

    It does not look at how children came about, so it is lossless on every tree.
    """

    offered = 0

    def residual(self, node: Any, state: Residual) -> Any:
        return self.target(node.p)

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Residual) -> Tensor:
        """sum_t p (1 - (1 - q)^k) (Algorithm 6)."""
        return hit_rates(p, q, draws, lambda p, q, rows: p)


class Greedy(NSS):
    """Greedy matching, for temperature 0: NSS where p is one-hot at every node visited, and an error elsewhere."""

    def target(self, p: Tensor) -> Tensor:
        """Raises UserError for a row [V] above temperature 0, ValueError where it is NaN. Rows [B, V] become zeros instead,
        from which no token can be drawn."""
        if p.dim() > 1:
            return torch.where(p.amax(-1, keepdim=True) >= 1 - 1e-6, p, 0.0)
        top = float(p.max())
        if math.isnan(top):
            raise ValueError("weights: the target's distribution is NaN")
        if top < 1 - 1e-6:
            raise UserError("verifier=greedy takes temperature 0 only; use nss, which is lossless on any tree.")
        return p


class SpecInfer(Rule):
    """Algorithm 4, NDE paper: round i accepts x with min(1, p_i(x) / q(x)), and p_{i+1} = norm((p_i - q)_+).

    p_i = (p - c_i q)_+ / z_i with a scalar c_i. With draws without replacement the draft's mass shrinks too (DySpec, Sequoia).
    Draft order is as lossless as the paper's random order, with the same acceptance rate.
    """

    def chance(self, px: Any, qx: Any, state: Residual, left: Any = None) -> Any:
        return accept(px, qx, state, 1.0, left)

    def reject(self, node: Any, state: Residual, left: Any = None, last: bool = False) -> Residual:
        return reject(node, state, 1.0, left, last)

    def residual(self, node: Any, state: Residual) -> Any:
        return excess(node.p, node.q, state.c)

    @property
    def lands(self) -> bool:
        """The residual has no mass at a draw that was rejected, so only draws that were not offered can be hit."""
        return self.offered is not None

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Residual) -> Tensor:
        """1 - z_k = sum_t min(p, c_k q) for the draws that are offered (Algorithm 9). The residual hits the others with
        sum_t (p - c q)_+ (1 - (1 - q)^j), where j is how many they are (Algorithm 7 has this for Naive, with c = 1)."""
        accepted, offered = 1 - states.z, states.z.shape[1] - 1
        if offered == int(draws.max()):
            return accepted
        others = (draws - offered).clamp(min=0)
        hits = hit_rates(p, q, others, lambda p, q, rows: excess(p, q, states.c[rows, offered]))
        return torch.cat([accepted, accepted[:, -1:] + hits[:, 1:]], -1)


class Naive(SpecInfer):
    """Algorithm 2, NDE paper: accept the first draw with min(1, p / q), otherwise t ~ norm((p - q)_+).

    On one path it is speculative sampling; on a tree (NaiveTree) the residual may still land on another draw.
    """

    offered = 1


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
    """K-SEQ (Algorithm 3, NDE paper): accept draws one after another with min(1, p / (rho q)), for the smallest valid rho.

    Any rho in [rho*, k] is lossless and any below is biased, so rho is the upper end of its bracket.
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
            rho, sum_of = threshold(partial_sums(node.p, node.q, torch.empty_like(node.p)), k, exact)
            return k_seq(rho, sum_of, k)
        k = node.count.clamp(min=1).double()

        def covered(rho: Tensor) -> Tensor:
            return (1 - excess(node.p, node.q, rho).sum(-1, dtype=torch.float64)).clamp(min=0)

        return k_seq(*threshold(covered, k, node.p.dtype == torch.float64, torch.ones_like(k)), k)

    def table(self, p: Tensor, q: Tensor, draws: Tensor) -> KSeq:
        """One row after the other: one of a large vocabulary stays in the cache until its rho are found."""
        most, scratch = int(draws.max()), torch.empty_like(p[0])
        fields = np.tile(np.array(KSeq(1.0, 0.0, 1.0))[:, None, None], (1, len(p), most + 1))
        rows = (draws > 0).nonzero()[:, 0]
        at_one = (1 - LabelRows(p, q, rows, draws[rows]).mass(1.0)).tolist()
        for row, count, own in zip(rows.tolist(), draws[rows].tolist(), at_one, strict=True):
            covered = partial_sums(p[row], q[row], scratch)
            for k in range(1, count + 1):
                rho, taken = threshold(covered, float(k), p.dtype == torch.float64, at_one=own) if k > 1 else (1.0, own)
                fields[:, row, k] = k_seq(rho, taken, k)
        return KSeq(*torch.from_numpy(fields).to(p.device))

    def chance(self, px: Any, qx: Any, state: KSeq, left: Any = None) -> Any:
        return ratio(px, state.rho * qx)

    def residual(self, node: Any, state: KSeq) -> Any:
        rho, _, fraction = (x.to(node.p)[:, None] if isinstance(x, Tensor) else x for x in state)
        return (node.p - torch.minimum(node.p, rho * node.q).mul_(fraction)).clamp_(min=0)

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: KSeq) -> Tensor:
        """p_acc(rho) (Algorithm 8, whose second term is 0 at rho*)."""
        return states.accepted


def partial_sums(p: Tensor, q: Tensor, scratch: Tensor) -> Callable[[float], float]:
    """rho -> sum_t min(p, rho q) of one row; scratch [V] is overwritten."""
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


TURNS = 12  # of the search on a device, where it cannot stop early; any rho that it has found valid by then is lossless


def threshold(
    covered: Callable[[Any], Any], k: Any, exact: bool = False, one: Any = 1.0, at_one: Any = None
) -> tuple[Any, Any]:
    """(rho, covered(rho)) with covered(x) = sum_t min(p, x q), for k draws: numbers of one node or tensors [B].

    rho* solves p_acc = covered (Algorithm 3), that is x = g(covered(x)) where g(b) = b / (1 - (1 - b)^(1/k)). covered
    grows and g falls, so g(covered(1)) is an upper bound. A secant on g(covered(x)) - x inside the bracket takes about four
    reductions.

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
        low, high, best = where(valid, low, x), where(valid, x, where(x < high, high, k)), where(valid, b, best)
        narrow = high - low <= tolerance * high
        done = done | (found & (narrow | (valid & (value >= -tolerance) & (not exact))))  # flat where p and q hardly differ
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
