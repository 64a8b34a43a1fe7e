"""Expected block efficiency of every action from one super-tree (Eq. 3, paper 000): pure functions of p, q and tokens.

A top-down rule's reach probabilities do not depend on L2 and its trunk factor is shared, so depth-wise cumulative sums
over the bundle of paths behind each branch point give every (K, L1, L2) at once; for K < K_max the estimate is averaged
over all subsets of the paths. Summing a rule's contribution draw by draw equals summing branching probabilities
over distinct children, so merged nodes need no bookkeeping beyond "which paths share this prefix".

Shapes: B bundles, S subsets of the K paths, L levels; a draw is a (bundle, path, level), its node is the parent it was
drawn from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from decoding.actions import action_space, canonical
from decoding.super_tree import SuperTreeLayout, super_tree_layout

_ROWS_AT_ONCE = 1024  # rows of [V] that a reduction materialises


@dataclass
class Bundle:
    """K i.i.d. paths from one node, B times over. tokens [B, K, L]; nodes [B, K, L]: row of `p`, `q` [R, V] that each
    token was drawn at; px, qx [B, K, L]: its probabilities there."""

    p: Tensor
    q: Tensor
    tokens: Tensor
    nodes: Tensor
    px: Tensor
    qx: Tensor


@dataclass
class Level:
    """One level of a bundle. px, qx [B, 1, K]; node [B, K]; member [S, K]; siblings [B, S, K, K]: [k, j] is True where
    members j < k were drawn at the same node; same_next [B, 1, K, K]: k and j continue with the same token."""

    px: Tensor
    qx: Tensor
    node: Tensor
    member: Tensor
    siblings: Tensor
    same_next: Tensor

    @property
    def earlier(self) -> Tensor:
        """[B, S, K]: how many member draws came before this one at its node."""
        return self.siblings.sum(-1)


def _levels(bundle: Bundle, member: Tensor):
    """Yield the bundle's `Level`s from the top."""
    paths = bundle.tokens.shape[1]
    before = torch.ones(paths, paths, dtype=torch.bool, device=bundle.tokens.device).tril(-1)
    same = torch.ones_like(before).expand(len(bundle.tokens), 1, -1, -1)
    for level in range(bundle.tokens.shape[2]):
        token = bundle.tokens[:, None, :, level]
        same_next = same & (token[..., :, None] == token[..., None, :])
        yield Level(
            bundle.px[:, None, :, level],
            bundle.qx[:, None, :, level],
            bundle.nodes[:, :, level],
            member,
            same & before & member[None, :, None, :] & member[None, :, :, None],
            same_next,
        )
        same = same_next


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """min(1, numerator_+ / denominator), 1 where the denominator vanishes under a positive numerator."""
    numerator = numerator.clamp(min=0)
    return torch.where(numerator >= denominator, (numerator > 0).to(numerator), numerator / denominator)


def _all_rejected(accept: Tensor, siblings: Tensor) -> Tensor:
    """[B, S, K]: probability that every earlier sibling of a draw was rejected, given accept [B, S, K]."""
    return torch.where(siblings, 1 - accept[:, :, None, :], 1.0).prod(-1)


def positive_sums(p: Tensor, q: Tensor, rows: Tensor, w0: Tensor, c: Tensor) -> Tensor:
    """sum_t (w0 p(t) - c q(t))_+ for rows [M] of p, q [R, V] with scalars w0, c [M]; [M], `_ROWS_AT_ONCE` at a time."""
    parts = []
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        chunk = slice(at, at + _ROWS_AT_ONCE)
        scaled = p[rows[chunk]] * w0[chunk, None]
        parts.append(scaled.addcmul_(q[rows[chunk]], c[chunk, None], value=-1).clamp_(min=0).sum(-1))
    return torch.cat(parts) if parts else w0.new_zeros(0)


# --- top-down rules: contribution of every draw to the branching probability of its token ---


class SpecInferRule:
    """Branching probabilities of SpecInfer in draft order: sum_i A_i a_i(X_i) 1{X_i = t}."""

    def __init__(self, p: Tensor, q: Tensor, draws: int):
        rows = torch.arange(len(p), device=p.device)
        one = p.new_ones(len(p))
        c, z = [torch.zeros_like(one)], [one]
        for _ in range(draws):
            c.append(c[-1] + z[-1])
            z.append(positive_sums(p, q, rows, one, c[-1]))
        self.c, self.z = torch.stack(c, -1), torch.stack(z, -1)  # [R, draws + 1]

    def contributions(self, level: Level) -> Tensor:
        """[B, S, K]; nought for draws outside the subset."""
        earlier = level.earlier
        c = self.c[level.node].unsqueeze(1).expand(-1, earlier.shape[1], -1, -1)
        z = self.z[level.node].unsqueeze(1).expand_as(c)
        c, z = (x.gather(-1, earlier[..., None])[..., 0] for x in (c, z))
        accept = _ratio(level.px - c * level.qx, z * level.qx)
        return accept * _all_rejected(accept, level.siblings) * level.member

    def acceptance(self, node: Tensor, draws: Tensor) -> Tensor:
        """alpha(f_{p,q,k}) at node [B, K] for k = draws [B, S, K]: 1 - Z_k."""
        z = self.z[node].unsqueeze(1).expand(-1, draws.shape[1], -1, -1)
        return 1 - z.gather(-1, draws[..., None])[..., 0]


class NaiveTreeRule:
    """Branching probabilities of NaiveTree: a 1{t = X_1} + (1 - a) p_res(t)."""

    def __init__(self, p: Tensor, q: Tensor, draws: int):
        rows = torch.arange(len(p), device=p.device)
        one = p.new_ones(len(p))
        self.z = positive_sums(p, q, rows, one, one)
        alpha = [torch.zeros_like(one), 1 - self.z]
        for k in range(2, draws + 1):
            alpha.append(alpha[1] + torch.cat([_residual_hits(p[i], q[i], k - 1) for i in rows.split(_ROWS_AT_ONCE)]))
        self.alpha = torch.stack(alpha, -1)

    def contributions(self, level: Level) -> Tensor:
        """[B, S, K]; a residual hit counts at the first draw of its token."""
        accept = _ratio(level.px, level.qx).expand(level.siblings.shape[:3])
        first = level.siblings.to(torch.uint8).argmax(-1)  # the first sibling; meaningless where there is none
        residual = (level.px - level.qx).clamp(min=0) / self.z[level.node][:, None].clamp(min=1e-30)
        repeated = (level.siblings & level.same_next).any(-1)
        later = (1 - accept.gather(-1, first)) * residual.clamp(max=1) * ~repeated
        return torch.where(level.earlier == 0, accept, later) * level.member

    def acceptance(self, node: Tensor, draws: Tensor) -> Tensor:
        """alpha [B, S, K]: sum min(p, q) + sum (p - q)_+ (1 - (1 - q)^(k - 1))."""
        alpha = self.alpha[node].unsqueeze(1).expand(-1, draws.shape[1], -1, -1)
        return alpha.gather(-1, draws[..., None])[..., 0]


def _residual_hits(p: Tensor, q: Tensor, others: int) -> Tensor:
    """sum_t (p - q)_+ (1 - (1 - q)^others), [R]."""
    hit = -torch.expm1(others * torch.log1p(-q.clamp(max=1 - 2**-24)))
    return ((p - q).clamp(min=0) * hit).sum(-1)


def top_down_gains(rule, bundle: Bundle, member: Tensor, start: Tensor, exact_last: bool) -> Tensor:
    """Cumulative gain [B, S, L + 1] in E[tau + 1] over the first 0..L levels, from reach probability `start` [B].

    exact_last: the last level counted comes from the exact acceptance rate of its parents instead of from the sampled
    children: unbiased, less noise (E[reach of level d] = E[sum over nodes of level d - 1 of reach * alpha]).
    """
    reach = start[:, None, None].expand(-1, len(member), member.shape[1])
    before = torch.zeros_like(reach[..., 0])
    totals = [before]
    for level in _levels(bundle, member):
        contributions = rule.contributions(level)
        sampled = before + (reach * contributions).sum(-1)
        if exact_last:
            first = level.member & (level.earlier == 0)
            # Members that share the first one's node are those it is an earlier sibling of, and itself.
            draws = (level.siblings.sum(-2) + 1) * first
            totals.append(before + (reach * rule.acceptance(level.node, draws) * first).sum(-1))
        else:
            totals.append(sampled)
        before = sampled
        reach = reach * (contributions[:, :, None, :] * level.same_next).sum(-1)
    return torch.stack(totals, -1)


def traversal_gains(bundle: Bundle, member: Tensor, start: Tensor) -> Tensor:
    """The same for traversal verification: 1 + sum over nodes u of visit(u) w(u) is unbiased for its E[tau + 1], where
    w(u) is the weight u arrives with and visit(u) the probability that no earlier sibling on the way was accepted.

    `start` [B] is the weight of the node that the bundle hangs from. K = 1 is block verification.
    """
    w0 = start[:, None, None].expand(-1, len(member), member.shape[1])
    visit = torch.ones_like(w0)
    totals = [torch.zeros_like(w0[..., 0])]
    for level in _levels(bundle, member):
        earlier = level.earlier
        c, d = torch.zeros_like(w0), torch.ones_like(w0)
        node = level.node[:, None].expand_as(earlier)
        for rejected in range(1, member.shape[1]):
            at = (earlier >= rejected) & level.member
            if not bool(at.any()):
                break
            c[at] += d[at]
            d[at] = positive_sums(bundle.p, bundle.q, node[at], w0[at], c[at]) + 1 - w0[at]
        weight = _ratio(w0 * level.px - c * level.qx, d * level.qx) * level.member
        visited = visit * _all_rejected(weight, level.siblings)
        totals.append(totals[-1] + (visited * weight).sum(-1))
        # A path's node is entered through the first member draw of its token.
        first = (level.same_next & level.member[None, :, None, :]).to(torch.uint8).argmax(-1)
        w0, visit = weight.gather(-1, first), visited.gather(-1, first)
    return torch.stack(totals, -1)


# --- all actions of a super-tree ---

_RULES: dict[str, Callable] = {"specinfer": SpecInferRule, "naivetree": NaiveTreeRule}
LABELLED = (*_RULES, "traversal")


def expected_block_efficiency(
    p: Tensor, q: Tensor, tokens: Tensor, verifier: str, layout: SuperTreeLayout | None = None, exact_last: bool = True
) -> Tensor:
    """Unbiased estimates [T, A] of E[tau + 1] for all A trees of the action space, one a super-tree.

    p, q: [T, N_inner, V] next-token distributions at the super-trees' inner rows; tokens [T, N] (the root's is not looked
    at); the columns are `decoding.actions.TREES` for the default layout, `action_space` gives them in general.
    Single paths are pooled over the ways to split them. Raises KeyError for a verifier without an estimator.
    """
    layout = layout or super_tree_layout()
    count, rows, _ = p.shape
    flat_p, flat_q = p.flatten(0, 1), q.flatten(0, 1)
    tree = torch.arange(count, device=p.device)[:, None, None, None]

    def bundle(paths: Tensor) -> Bundle:
        """paths [P, K, L] of row numbers -> the bundles of all super-trees, [T * P, K, L]."""
        nodes = (layout.parents.to(p.device)[paths] + tree * rows).flatten(0, 1)
        token = tokens[tree, paths].flatten(0, 1)
        return Bundle(flat_p, flat_q, token, nodes, flat_p[nodes, token], flat_q[nodes, token])

    trunk = torch.arange(1, layout.l1 + 1, device=p.device).view(1, 1, -1)
    alone = torch.ones(1, 1, dtype=torch.bool, device=p.device)
    subsets = torch.tensor(list(product((False, True), repeat=layout.k))[1:], device=p.device)
    start = p.new_ones(count)
    if verifier == "traversal":
        sampled = exact = traversal_gains(bundle(trunk), alone, start)[:, 0]
        reach = torch.cat([start[:, None], sampled.diff(dim=-1)], -1)  # weight at every branch point
        gains = traversal_gains(bundle(layout.paths.to(p.device)), subsets, reach.flatten())
    else:
        rule = _RULES[verifier](flat_p, flat_q, layout.k)
        sampled = top_down_gains(rule, bundle(trunk), alone, start, False)[:, 0]
        exact = top_down_gains(rule, bundle(trunk), alone, start, True)[:, 0] if exact_last else sampled
        reach = torch.cat([start[:, None], sampled.diff(dim=-1)], -1)
        gains = top_down_gains(rule, bundle(layout.paths.to(p.device)), subsets, reach.flatten(), exact_last)

    size = subsets.sum(-1)
    mean = torch.stack([(size == k).double() / (size == k).sum() for k in range(1, layout.k + 1)]).to(p)  # [K, S]
    gains = gains.view(count, layout.l1 + 1, len(subsets), layout.l2 + 1)
    value = 1 + sampled[:, None, :, None] + torch.einsum("ks,tbsl->tkbl", mean, gains)  # [T, K, L1 + 1, L2 + 1]
    value[:, :, :, 0] = 1 + exact[:, None]
    return value.flatten(1) @ _pooling(layout).to(value)


@cache
def _pooling(layout: SuperTreeLayout) -> Tensor:
    """[K (L1 + 1) (L2 + 1), A]: average of the estimates of equal trees, weighted by the paths each one averages."""
    actions, trees = action_space(layout.k, layout.l1, layout.l2)
    pooling = torch.zeros(len(actions), len(trees), dtype=torch.float64)
    for row, action in enumerate(actions):
        if action.k == 1 or action.l2 > 0:  # the bare trunk is the same estimate for every K
            pooling[row, trees.index(canonical(action))] = layout.k if action.k == 1 and action.l2 else 1
    return pooling / pooling.sum(0)
