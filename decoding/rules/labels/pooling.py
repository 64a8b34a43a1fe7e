"""Expected block efficiency of every action from one super-tree (Eq. 3, NDE paper).

A top-down rule's reach probabilities do not depend on L2 and its trunk factor is shared, so
depth-wise cumulative sums over the bundle of paths after each branch point give every (K, L1, L2)
at once; for K < K_max the estimate is averaged over all subsets of the paths. Bottom-up rules have
gains of the same form (`traversal_gains`, `gbv_gains`).

Shapes are as in `branching`.
"""

from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.actions import action_space, canonical
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.labels.branching import Bundle, Level, draws_by_row, levels
from nde_talf.decoding.rules.labels.traversal import path_weights
from nde_talf.decoding.rules.walk import Rule
from nde_talf.decoding.super_tree import SuperTreeLayout


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
    """Return the gains [B, S, L2 + 1] of the first 0..L2 levels of B bundles in E[tau + 1].

    They are for every subset of their K paths, from the reach probability or weight `start` [B] of
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
