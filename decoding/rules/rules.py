"""The top-down rules.

Each is written once and runs on numbers of one node or on tensors of many.

A rule is a solver f(p, q, X) of optimal transport with list information (section 3.2, NDE paper):
given the draws X of a node it returns a token whose law is p, and which is one of X as often as
possible. It tries the draws one after another. `chance` is the probability that the next one is
accepted, `reject` gives the state after its rejection, and `residual` is what the token is drawn
from when none was accepted:

    state = rule.start(node)
    for each draw x in draft order:
        accept x with probability rule.chance(p(x), q(x), state)
        state = rule.reject(node, state)
    otherwise draw from rule.residual(node, state)

Three drivers use these four methods: `walk.solve` on the host, `walk.solve_rows` for the current
nodes of many trees on a device, and `branching.OfRule` for the branching probabilities that labels
are made of. So all three use the same formulas.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device import number
from nde_talf.decoding.rules.reduce import hit_rates, positive_sums, total
from nde_talf.decoding.sampling import LEAST_MASS, Rng

Numbers = float | Tensor
EMPTY = 1e-12
"""A residual with less mass than this is rounding noise (p = q), and the token is drawn from p."""


Scaled = tuple[Tensor, float]
"""A row [V] and what it has to be divided by."""


def scaled(row: Any) -> Scaled:
    """A row [V], or a `WarpedRow` as far as it is made."""
    return (row, 1.0) if isinstance(row, Tensor) else row.weights()


def ratio(numerator: Any, denominator: Any) -> Any:
    """min(1, numerator_+ / denominator) of numbers or tensors; 1 where the denominator vanishes
    under a positive numerator.
    """
    if isinstance(numerator, Tensor):
        numerator = numerator.clamp(min=0)
        return torch.where(
            numerator >= denominator, (numerator > 0).to(numerator), numerator / denominator
        )
    return 0.0 if numerator <= 0 else 1.0 if numerator >= denominator else numerator / denominator


def where(condition: Any, yes: Any, no: Any) -> Any:
    """torch.where, or the same of numbers."""
    return (
        torch.where(condition, yes, no)
        if isinstance(condition, Tensor)
        else (yes if condition else no)
    )


def excess(p: Any, q: Any, c: Any, w0: Any = 1.0) -> Any:
    """(w0 p - c q)_+ of numbers at a token, of a row [V], or of rows [R, V] with a scalar or c, w0
    [R] a row.

    Where c is the number 0 it returns p itself: the same distribution.
    """
    if not isinstance(p, Tensor):
        return max(w0 * p - c * q, 0.0)
    if not isinstance(c, Tensor):
        if c == 0:
            return p
        return (
            p.sub(q, alpha=c) if isinstance(w0, float) and w0 == 1 else (w0 * p).sub_(q, alpha=c)
        ).clamp_(min=0)
    if p.dim() > c.dim():
        c, w0 = (x.to(p)[..., None] if isinstance(x, Tensor) else x for x in (c, w0))
    return (w0 * p - c * q).clamp_(min=0)


class Node:
    """One node on the host.

    Args:
        p, q: rows [V], or what gives a probability by token and the row by `dense()` (`WarpedRow`,
            `gbv.TiltedRow`).
        drafted: its draws in draft order, with repeats.
        left: for draws without replacement, the mass of q that each was drawn from
            (`DraftTree.masses`).
    """

    def __init__(self, p: Any, q: Any, drafted: list[int], left: list[float] | None = None):
        self._p, self._q, self.drafted, self.left, self.count = p, q, drafted, left, len(drafted)
        self._rest: tuple[float, Tensor, float] | None = None

    @property
    def p(self) -> Tensor:
        return self._p if isinstance(self._p, Tensor) else self._p.dense()

    def is_p(self, weights: Tensor) -> bool:
        """Whether these are the row p itself, perhaps not normalised yet."""
        return weights is scaled(self._p)[0]

    @property
    def q(self) -> Any:
        return self._q if isinstance(self._q, Tensor) or self._q is None else self._q.dense()

    def px(self, draw: int) -> float:
        return number(self._p, self.drafted[draw])

    def qx(self, draw: int) -> float:
        return number(self._q, self.drafted[draw])

    def mass(self, c: float, w0: float = 1.0) -> float:
        """Z = sum_t (w0 p(t) - c q(t))_+ = w0 sum_t (p(t) - c / w0 q(t))_+."""
        found = total(self.rest(c, w0))
        assert self._rest is not None
        return w0 * found / self._rest[2]

    def rest(self, c: float, w0: float = 1.0) -> Tensor:
        """Weights [V] in proportion to (w0 p - c q)_+.

        Where c / w0 is no float32 number there are none, to its rounding.

        A row of p that is not normalised stays so: with sum t it gives t times these weights.
        """
        fraction = min(c / w0, 1e37)
        if self._rest is None or self._rest[0] != fraction:
            row, scale = scaled(self._p)
            self._rest = fraction, excess(row, self.q, fraction * scale), scale
        return self._rest[1]


class Nodes:
    """A node in each of B trees, on a device. p, q [B, V]; draws [B, n]: token ids in draft order,
    of which the first counts [B] are the node's own; left: float64 [B, n], or None for i.i.d.
    draws. q may be a function that makes the rows when they are first asked for.
    """

    def __init__(
        self,
        p: Tensor,
        q: Tensor | Callable[[], Tensor],
        draws: Tensor,
        counts: Tensor,
        left: Tensor | None = None,
    ):
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
    """Rows number `rows` [M] of p, q [R, V], of which a chunk is held at a time; `count` [M] draws
    were made at each.
    """

    def __init__(self, p: Tensor, q: Tensor, rows: Tensor, count: Tensor):
        self.p, self.q, self.rows, self.count = p, q, rows, count

    def mass(self, c: Tensor | float, w0: Tensor | float = 1.0) -> Tensor:
        one = torch.ones(len(self.rows), dtype=torch.float64, device=self.p.device)
        return positive_sums(self.p, self.q, self.rows, w0 * one, c * one)


class Residual(NamedTuple):
    """The one-parameter family: what is left of p after some rejections is (w0 p - c q)_+ / z, for
    a scalar c.

    w0 in [0, 1] is the weight that the node is reached with: 1 for top-down rules. z is the
    residual's mass and d = z + 1 - w0.
    """

    c: Any = 0.0
    z: Any = 1.0
    d: Any = 1.0


def accept(px: Any, qx: Any, state: Residual, w0: Any = 1.0, left: Any = None) -> Any:
    """Probability that the next draw x is accepted: min(1, (w0 p(x) - c q(x))_+ / (d q(x))).

    left: for a draw without replacement, the mass of q that it was drawn from, which divides q(x).
    Below `LEAST_MASS` there was nothing to draw from, so that the draw is never accepted.
    """
    mass = w0 * px - state.c * qx
    if left is None:
        return ratio(mass, state.d * qx)
    scale = (
        state.d
        * qx
        / (left.clamp(min=LEAST_MASS) if isinstance(left, Tensor) else max(left, LEAST_MASS))
    )
    return where(left >= LEAST_MASS, ratio(mass, scale), 0.0)


def reject(
    node: Any, state: Residual, w0: Any = 1.0, left: Any = None, last: bool = False
) -> Residual:
    """The state after one more rejected draw, a repeated one too: c' = c + d, z' = sum_t (w0 p - c'
    q)_+, d' = z' + 1 - w0.

    Without replacement c' = c + d / left (Appendix A.3, DySpec paper). last: no draw follows, so
    that z' is not asked for.
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
        lands: the token that is drawn from the residual may be one of the node's draws. Labels
            count such hits where this is True; False saves the time where the residual has no mass
            at any draw that was rejected.
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
        """The state after one more rejected draw. last: no draw follows, so what only the next one
        needs can be left out.
        """
        return state

    def residual(self, node: Any, state: Any) -> Any:
        """What the token is drawn from when no draw was accepted: weights, not normalised.

        They have the shape of node.p, which is a row [V], rows [B, V] or numbers at single tokens.
        """
        raise NotImplementedError

    def landing(self, px: Tensor, qx: Tensor, state: Any) -> Tensor:
        """The probability that a draw from the residual is the token with p(x), q(x); state.z is
        the residual's mass.
        """
        return (self.residual(SimpleNamespace(p=px, q=qx), state) / state.z.clamp(min=1e-30)).clamp(
            max=1
        )

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Any) -> Tensor:
        """Acceptance rates [R, max(draws) + 1] of rows of p, q [R, V] by number of i.i.d. draws."""
        raise NotImplementedError

    def table(self, p: Tensor, q: Tensor, draws: Tensor) -> Any:
        """The states at rows of p, q [R, V] that have up to draws [R] draws: each field a tensor
        [R, n], of which column j is the state after j rejections (`by_count`: with j draws).
        """
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
    """Greedy matching, for temperature 0: NSS where p is one-hot at every node visited, and an
    error elsewhere.
    """

    def target(self, p: Tensor) -> Tensor:
        """Raises UserError for a row [V] above temperature 0, ValueError where it is NaN.

        Rows [B, V] become zeros instead, from which no token can be drawn.
        """
        if p.dim() > 1:
            return torch.where(p.amax(-1, keepdim=True) >= 1 - 1e-6, p, 0.0)
        top = float(p.max())
        if math.isnan(top):
            raise ValueError("weights: the target's distribution is NaN")
        if top < 1 - 1e-6:
            raise UserError(
                "verifier=greedy takes temperature 0 only; use nss, which is lossless on any tree."
            )
        return p


class SpecInfer(Rule):
    """Algorithm 4, NDE paper: round i accepts x with min(1, p_i(x) / q(x)), and p_{i+1} = norm((p_i
    - q)_+).

    p_i = (p - c_i q)_+ / z_i with a scalar c_i. With draws without replacement the draft's mass
    shrinks too (DySpec, Sequoia). Draft order is as lossless as the paper's random order, with the
    same acceptance rate.
    """

    def chance(self, px: Any, qx: Any, state: Residual, left: Any = None) -> Any:
        return accept(px, qx, state, 1.0, left)

    def reject(self, node: Any, state: Residual, left: Any = None, last: bool = False) -> Residual:
        return reject(node, state, 1.0, left, last)

    def residual(self, node: Any, state: Residual) -> Any:
        return node.rest(state.c) if isinstance(node, Node) else excess(node.p, node.q, state.c)

    @property
    def lands(self) -> bool:
        """The residual has no mass at a draw that was rejected, so only draws that were not offered
        can be hit.
        """
        return self.offered is not None

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Residual) -> Tensor:
        """1 - z_k = sum_t min(p, c_k q) for the draws that are offered (Algorithm 9).

        The residual hits the others with sum_t (p - c q)_+ (1 - (1 - q)^j), where j is how many
        they are (Algorithm 7 has this for Naive, with c = 1).
        """
        accepted, offered = 1 - states.z, states.z.shape[1] - 1
        if offered == int(draws.max()):
            return accepted
        others = (draws - offered).clamp(min=0)
        hits = hit_rates(p, q, others, lambda p, q, rows: excess(p, q, states.c[rows, offered]))
        return torch.cat([accepted, accepted[:, -1:] + hits[:, 1:]], -1)


class Naive(SpecInfer):
    """Algorithm 2, NDE paper: accept the first draw with min(1, p / q), otherwise t ~ norm((p -
    q)_+).

    On one path it is speculative sampling; on a tree (NaiveTree) the residual may still land on
    another draw.
    """

    offered = 1
