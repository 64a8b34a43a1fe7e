"""Expected block efficiency of every action from one super-tree (Eq. 3, NDE paper).

A top-down rule's reach probabilities do not depend on L2 and its trunk factor is shared, so
depth-wise cumulative sums over the bundle of paths after each branch point give every (K, L1, L2)
at once; for K < K_max the estimate is averaged over all subsets of the paths. Bottom-up rules have
gains of the same form (`traversal_gains`, `gbv_gains`).

Shapes: B bundles of K i.i.d. paths, S subsets of the paths, L levels; a draw is a (bundle, path,
level), its node is the row of p and q that it was drawn at. Paths that share a prefix share its
node: the row of the first of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREE_INDEX, TREES, Action, action_space, canonical
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.residual import excess
from nde_talf.decoding.rules.sums import positive_sums
from nde_talf.decoding.rules.traversal_labels import path_weights
from nde_talf.decoding.rules.walk import Rule
from nde_talf.decoding.super_tree import SuperTreeLayout


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


def states_after(rule: Rule, p: Tensor, q: Tensor, draws: Tensor) -> Any:
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

    def __init__(self, rule: Rule, p: Tensor, q: Tensor, draws: Tensor):
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


def trunk_reach(trunk: Bundle, count: int, verifier: str) -> tuple[Tensor, Tensor]:
    """Return the reach at every branch point, and E[tau] of every bare trunk; both [T, L1 + 1].

    Reach is a probability, for bottom-up rules the weight. E[tau] is with its last token in
    expectation, for bottom-up rules as sampled.

    trunk: the draws of `count` = T super-trees' trunks as bundles [T * L1, 1, 1].
    """
    one = trunk.p.new_ones(count, 1, dtype=torch.float64)
    if not len(trunk.tokens):
        return one, torch.zeros_like(one)
    (level,) = levels(trunk, torch.ones(1, 1, dtype=torch.bool, device=trunk.p.device))
    labels = VERIFIERS[verifier].labels
    if not isinstance(labels, Rule):
        reach = path_weights(*(x.view(count, -1) for x in (level.px, level.qx)))
        return reach, reach.cumsum(-1) - 1
    rule = labels.branching(trunk.p, trunk.q, draws_by_row([level]))
    each, last = (x.view(count, -1) for x in rule.parts(level))
    reach = torch.cat([one, each], -1).cumprod(-1)
    exact = torch.cat([0 * one, reach[:, :-1] * last], -1)
    exact[:, 2:] += reach[:, 1:-1].cumsum(-1)
    return reach, exact


def branch_gains(branches: Bundle, start: Tensor, verifier: str) -> Tensor:
    """Return [B, S, L2 + 1]: what the first 0..L2 levels of B bundles add to E[tau + 1].

    That is for every subset of their K paths, from the reach probability or weight `start` [B] of
    the node that each hangs from.
    """
    paths = branches.tokens.shape[1]
    subsets = torch.tensor(list(product((False, True), repeat=paths))[1:], device=start.device)
    bundle_levels = list(levels(branches, subsets))
    if not bundle_levels:
        return start.new_zeros(len(start), len(subsets), 1)
    labels = VERIFIERS[verifier].labels
    if not isinstance(labels, Rule):
        return labels(bundle_levels, start)
    rule = labels.branching(branches.p, branches.q, draws_by_row(bundle_levels))
    return top_down_gains(rule, bundle_levels, start)


def top_down_gains(branching: Any, levels: list[Level], start: Tensor) -> Tensor:
    """Return cumulative gains [B, S, L + 1] in E[tau + 1] over the first 0..L levels.

    Summing contributions draw by draw equals summing branching probabilities over distinct
    children. The last level counted is taken in expectation over its children. That is unbiased
    too, with less noise: E[reach of level d] = E[sum over nodes of level d - 1 of reach * alpha].

    Args:
        branching: `Branching`, or what has its `parts`.
        levels: the bundle's.
        start: [B], the reach probability of the node that each bundle hangs from.
    """
    member = levels[0].member
    reach = start.double()[:, None, None].expand(-1, len(member), member.shape[1])
    before = torch.zeros_like(reach[..., 0])
    expected = [before]
    for level in levels:
        contributions, rates = branching.parts(level)
        expected.append(before + (reach * rates).sum(-1))
        before = before + (reach * contributions).sum(-1)
        reach = reach * (contributions[:, :, None, :] * level.same_next).sum(-1)
    return torch.stack(expected, -1)


def pooled(reach: Tensor, trunk: Tensor, gains: Tensor, layout: SuperTreeLayout) -> Tensor:
    """Return estimates [T, A], averaged over the subsets of K paths.

    Single paths are averaged over the ways to split them.

    Args:
        reach: [T, L1 + 1], of `trunk_reach`.
        trunk: [T, L1 + 1], E[tau] of the bare trunks, of `trunk_reach`.
        gains: [T * (L1 + 1), S, L2 + 1], of `branch_gains`.
        layout: the super-trees'.
    """
    size = torch.tensor(
        [sum(chosen) for chosen in product((0, 1), repeat=layout.k)][1:], device=reach.device
    )
    mean = torch.stack(
        [(size == k).double() / (size == k).sum() for k in range(1, layout.k + 1)]
    )  # [K, S]
    gains = gains.view(len(reach), layout.l1 + 1, len(size), layout.l2 + 1)
    sampled = reach.cumsum(-1) - 1
    value = (
        1 + sampled[:, None, :, None] + torch.einsum("ks,tbsl->tkbl", mean, gains)
    )  # [T, K, L1 + 1, L2 + 1]
    value[:, :, :, 0] = 1 + trunk[:, None]
    return value.flatten(1) @ pooling(layout).to(value)


@cache
def pooling(layout: SuperTreeLayout) -> Tensor:
    """Return [K (L1 + 1) (L2 + 1), A]: the average of the estimates of equal trees.

    It is weighted by the paths that each one averages.
    """
    actions, trees = action_space(layout.k, layout.l1, layout.l2)
    pooling = torch.zeros(len(actions), len(trees), dtype=torch.float64)
    for row, action in enumerate(actions):
        if action.k == 1 or action.l2 > 0:  # the bare trunk is the same estimate for every K
            weight = layout.k if action.k == 1 and action.l2 else 1
            pooling[row, trees.index(canonical(action))] = weight
    return pooling / pooling.sum(0)


def of_first_path(estimates: Tensor) -> Tensor:
    """Return estimates [..., 233] of single paths in place of every tree's.

    They are for a rule that verifies only the first path of a tree.
    """
    return estimates[..., [TREE_INDEX[Action(1, 0, tree.depth)] for tree in TREES]]
