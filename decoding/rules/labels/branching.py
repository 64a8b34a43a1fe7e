"""Branching probabilities of a rule at many nodes at once (Eq. 1, NDE paper).

Shapes: B bundles of K i.i.d. paths, S subsets of the paths, L levels; a draw is a (bundle, path,
level), its node is the row of p and q that it was drawn at. Paths that share a prefix share its
node: the row of the first of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.rules.residual import excess
from nde_talf.decoding.rules.sums import positive_sums


@dataclass
class Bundle:
    """K i.i.d. paths from one node, B times over.

    Attributes:
        p, q: [R, V].
        tokens: [B, K, L].
        nodes: [B, K, L], the row of p and q that each token was drawn at.
    """

    p: Tensor
    q: Tensor
    tokens: Tensor
    nodes: Tensor


@dataclass
class Level:
    """One level of a bundle.

    Attributes:
        p, q: the bundle's.
        token, node: [B, K].
        px, qx: [B, 1, K] (float64), the draw's probabilities at its node.
        member: [S, K].
        same: [B, 1, K, K]. k and j were drawn at the same node.
        siblings: [B, S, K, K]. True at [k, j] where members j < k were drawn at the same node.
        same_next: [B, 1, K, K]. k and j continue with the same token.
    """

    p: Tensor
    q: Tensor
    token: Tensor
    node: Tensor
    px: Tensor
    qx: Tensor
    member: Tensor
    same: Tensor
    siblings: Tensor
    same_next: Tensor

    @cached_property
    def earlier(self) -> Tensor:
        """[B, S, K]: how many member draws came before this one at its node."""
        return self.siblings.sum(-1)

    @cached_property
    def draws(self) -> Tensor:
        """[B, S, K]: how many member draws its node has in all, this one included."""
        return (self.same & self.member[None, :, None, :]).sum(-1)

    @cached_property
    def fresh(self) -> Tensor:
        """[B, S, K]: whether no earlier member draw at its node gave the same token."""
        return ~(self.siblings & self.same_next).any(-1)

    def none_before(self, accept: Tensor) -> Tensor:
        """Return [B, S, K]: the probability that all earlier siblings of a draw were rejected.

        accept: [B, S, K], with what probability each draw is accepted.
        """
        return torch.where(self.siblings, 1 - accept[:, :, None, :], 1.0).prod(-1)

    def look_up(self, table: Tensor, count: Tensor) -> Tensor:
        """Return `table` [R, n] at each draw's node and `count` [B, S, K]: [B, S, K]."""
        rows = table[self.node].unsqueeze(1).expand(-1, count.shape[1], -1, -1)
        return rows.gather(-1, count[..., None])[..., 0]

    def states(self, table: Any, count: Tensor) -> Any:
        """Return a rule's states at every draw after `count` [B, S, K] rejections.

        table: of `Rule.table`.
        """
        fields = (self.look_up(field, count.clamp(max=field.shape[1] - 1)) for field in table)
        return type(table)(*fields)

    def at_first(self, alpha: Tensor) -> Tensor:
        """Return acceptance rates [B, S, K], each at its node's first member draw.

        alpha: [R, draws + 1], by row and number of children.
        """
        return self.look_up(alpha, self.draws) * (self.member & (self.earlier == 0))


def levels(bundle: Bundle, member: Tensor) -> Iterator[Level]:
    """Yield the bundle's levels from the top, for the subsets `member` [S, K] of its paths."""
    paths = bundle.tokens.shape[1]
    before = torch.ones(paths, paths, dtype=torch.bool, device=bundle.tokens.device).tril(-1)
    both = before & member[:, None, :] & member[:, :, None]
    same = torch.ones_like(before).expand(len(bundle.tokens), 1, -1, -1)
    for level in range(bundle.tokens.shape[2]):
        token = bundle.tokens[:, :, level]
        node = bundle.nodes[:, :, level].gather(1, same[:, 0].to(torch.uint8).argmax(-1))
        same_next = same & (token[:, None, :, None] == token[:, None, None, :])
        px, qx = (rows[node, token].double()[:, None] for rows in (bundle.p, bundle.q))
        yield Level(bundle.p, bundle.q, token, node, px, qx, member, same, same & both, same_next)
        same = same_next


def draws_by_row(levels: list[Level]) -> Tensor:
    """Return [R]: the number of draws at the node of each row of p; 0 for a row without a node."""
    counts = torch.zeros(len(levels[0].p), dtype=torch.long, device=levels[0].p.device)
    for level in levels:
        counts.scatter_reduce_(0, level.node.flatten(), level.same[:, 0].sum(-1).flatten(), "amax")
    return counts


@dataclass
class _Rows:
    """Rows number `rows` [M] of p, q [R, V], of which a chunk is held at a time."""

    p: Tensor
    q: Tensor
    rows: Tensor

    def mass(self, c: Tensor, w0: float) -> Tensor:
        """Return sum_t (p(t) - c q(t))_+, [M]; w0 is 1."""
        return positive_sums(self.p, self.q, self.rows, torch.ones_like(c), c)


def states_after(rule: Any, p: Tensor, q: Tensor, draws: Tensor) -> Any:
    """Return a rule's states [R, n] after 0.. rejections; see `Rule.table`."""
    turns = int(draws.max()) if rule.offered is None else min(rule.offered, int(draws.max()))
    first = rule.start(None)
    fields = [p.new_full((len(p), turns + 1), value, dtype=torch.float64) for value in first]
    for turn in range(1, turns + 1):
        rows = (draws >= turn).nonzero()[:, 0]
        before = type(first)(*(field[rows, turn - 1] for field in fields))
        after = rule.reject(_Rows(p, q, rows), before)
        for field, value in zip(fields, after, strict=True):
            field[rows, turn] = value
    return type(first)(*fields)


class _Draws(NamedTuple):
    """Draws as a rule's `residual` looks at a node: p and q [B, 1, K] of their tokens alone."""

    p: Tensor
    q: Tensor

    def rest(self, c: Tensor) -> Tensor:
        """Return (p - c q)_+."""
        return excess(self.p, self.q, c)


class Branching:
    """Branching probabilities of a rule at rows of p, q [R, V] (Eq. 1, NDE paper).

    B(f, X, t) = sum_j A_j a_j 1{X_j = t} + A_k p_res(t): a_j is the chance of the j-th draw, A_j
    the probability that all before it were rejected, and the residual counts at the first draw of a
    token.

    draws: [R], how many children row r has at most.
    """

    def __init__(self, rule: Any, p: Tensor, q: Tensor, draws: Tensor):
        self.rule, self.states = rule, rule.table(p, q, draws)
        self.alpha = rule.alpha(p, q, draws, self.states)

    def parts(self, level: Level) -> tuple[Tensor, Tensor]:
        """Return what each draw adds to B(f, X, its token); both [B, S, K].

        The first as sampled: summed over equal tokens it is B. The second in expectation over the
        children, given only how many a node has: the acceptance rate, at the node's first draw.
        """
        rule, earlier = self.rule, level.earlier
        added = torch.zeros(earlier.shape, dtype=torch.float64, device=earlier.device)
        if rule.offered != 0:
            state = level.states(self.states, level.draws if rule.by_count else earlier)
            accept = rule.chance(level.px, level.qx, state)
            if rule.offered is not None:
                accept = torch.where(earlier < rule.offered, accept, 0.0)
            added = accept * level.none_before(accept)
        if rule.can_hit_draft or rule.offered is not None:
            state = level.states(self.states, level.draws)
            hit = rule.residual(_Draws(level.px, level.qx), state) / state.z.clamp(min=1e-30)
            hit = hit.clamp(max=1) * level.fresh
            if rule.offered != 0:
                drawn = level.same & level.member[None, :, None, :]
                hit *= torch.where(drawn, 1 - accept[:, :, None, :], 1.0).prod(-1)
            added = added + hit
        return added * level.member, level.at_first(self.alpha)
