"""Expected block efficiency of every action from one super-tree (Eq. 3, NDE paper): pure functions
of p, q and tokens.

A top-down rule's reach probabilities do not depend on L2 and its trunk factor is shared, so
depth-wise cumulative sums over the bundle of paths after each branch point give every (K, L1, L2)
at once; for K < K_max the estimate is averaged over all subsets of the paths. The bottom-up rules
have gains of the same form (`traversal_gains`, `gbv_gains`).
"""

from functools import cache
from itertools import product

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREE_INDEX, TREES, Action, action_space, canonical
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.rules.branching import BRANCHING, Branching
from nde_talf.decoding.rules.bundles import Bundle, Level, draws_by_row, joined, levels
from nde_talf.decoding.rules.check import check_pair_of_rows
from nde_talf.decoding.rules.gbv import gbv_gains
from nde_talf.decoding.rules.traversal import path_weights, traversal_gains
from nde_talf.decoding.super_tree import SuperTreeLayout, super_tree_layout


def expected_block_efficiency(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    verifier: str,
    layout: SuperTreeLayout | None = None,
    exact_last: bool = True,
    check: bool = True,
) -> Tensor:
    """Unbiased estimates [T, A] of E[tau + 1] for all A trees of the action space, one a
    super-tree.

    p, q: [T, N_inner, V] next-token distributions at the super-trees' inner rows; tokens [T, N]
    (the root's is not looked at); the columns are `nde_talf.decoding.actions.TREES` for the default
    layout, `action_space` gives them in general. Single paths are pooled over the ways to split
    them. exact_last: see `top_down_gains`; bottom-up rules do without. Where the rows don't fit
    into memory at once, `trunk_reach`, `branch_gains` and `pooled` do the same in parts. Raises
    UserError for a verifier without an estimator, ValueError for shapes that do not fit or, where
    `check`, for rows that are no distributions.
    """
    layout = layout or super_tree_layout()
    check_labelled(verifier)
    if p.dim() != 3 or p.shape[1] != layout.inner or tokens.shape != (len(p), len(layout)):
        raise ValueError(
            f"p, tokens: their shapes are {tuple(p.shape)} and {tuple(tokens.shape)}; for this"
            f" layout expected [T, {layout.inner}, V] and [T, {len(layout)}]."
        )
    if check:
        check_pair_of_rows(p.flatten(0, 1), q.flatten(0, 1))
    count, rows, _ = p.shape
    flat_p, flat_q = p.flatten(0, 1), q.flatten(0, 1)
    tree = torch.arange(count, device=p.device)[:, None, None, None]

    def bundle(paths: Tensor) -> Bundle:
        """Paths [P, K, L] of row numbers -> the bundles of all super-trees, [T * P, K, L]."""
        nodes = (layout.parents.to(p.device)[paths] + tree * rows).flatten(0, 1)
        return Bundle(flat_p, flat_q, tokens[tree, paths].flatten(0, 1), nodes)

    reach, exact = trunk_reach(bundle(trunk_paths(layout).to(p.device)), count, verifier)
    gains = branch_gains(bundle(layout.paths.to(p.device)), reach.flatten(), verifier, exact_last)
    return pooled(reach, exact if exact_last else reach.cumsum(-1) - 1, gains, layout)


def check_labelled(verifier: str) -> None:
    """Raise UserError for a verifier without an estimator."""
    if verifier not in LABELLED:
        raise UserError(
            f"verifier={verifier}: it has no labels; choose one of {', '.join(LABELLED)}."
        )


def trunk_paths(layout: SuperTreeLayout) -> Tensor:
    """[L1, 1, 1]: the trunk as bundles of one draw: its levels are independent until they are
    multiplied up.
    """
    return torch.arange(1, layout.l1 + 1).view(-1, 1, 1)


def trunk_reach(trunk: Bundle, count: int, verifier: str) -> tuple[Tensor, Tensor]:
    """Of `count` = T super-trees, from their trunks' draws as bundles [T * L1, 1, 1]: the reach
    probability (for bottom-up rules the weight) at every branch point, and E[tau] of every bare
    trunk with its last token in expectation (for bottom-up rules as sampled); both [T, L1 + 1].
    """
    one = trunk.p.new_ones(count, 1, dtype=torch.float64)
    if not len(trunk.tokens):
        return one, torch.zeros_like(one)
    (level,) = levels(trunk, torch.ones(1, 1, dtype=torch.bool, device=trunk.p.device))
    if verifier in BRANCHING:
        rule = BRANCHING[verifier](trunk.p, trunk.q, draws_by_row([level], trunk.p))
        reach = torch.cat([one, rule.contributions(level).view(count, -1)], -1).cumprod(-1)
        exact = torch.cat([0 * one, reach[:, :-1] * rule.last(level).view(count, -1)], -1)
        exact[:, 2:] += reach[:, 1:-1].cumsum(-1)
        return reach, exact
    reach = path_weights(*(x.view(count, -1) for x in (level.px, level.qx)))
    return reach, reach.cumsum(-1) - 1


def branch_gains(branches: Bundle, start: Tensor, verifier: str, exact_last: bool = True) -> Tensor:
    """[B, S, L2 + 1]: what the first 0..L2 levels of B bundles add to E[tau + 1], for every subset
    of their K paths, from the reach probability or weight `start` [B] of the node that each hangs
    from.
    """
    paths = branches.tokens.shape[1]
    subsets = torch.tensor(list(product((False, True), repeat=paths))[1:], device=start.device)
    found = list(levels(branches, subsets))
    if not found:
        return start.new_zeros(len(start), len(subsets), 1)
    if verifier in BRANCHING:
        rule = BRANCHING[verifier](branches.p, branches.q, draws_by_row(found, branches.p))
        return top_down_gains(rule, found, start)[int(exact_last)]
    return (gbv_gains if verifier == "gbv" else traversal_gains)(found, start)


def top_down_gains(rule: Branching, levels: list[Level], start: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative gains [B, S, L + 1] in E[tau + 1] over the first 0..L levels, from reach
    probability `start` [B]: as sampled, and with the last level counted taken in expectation over
    its children.

    Summing contributions draw by draw equals summing branching probabilities over distinct
    children. The second is unbiased too, with less noise: E[reach of level d] = E[sum over nodes of
    level d - 1 of reach * alpha].
    """
    member = levels[0].member
    reach = start.double()[:, None, None].expand(-1, len(member), member.shape[1])
    before = torch.zeros_like(reach[..., 0])
    sampled, expected = [before], [before]
    joint = joined(levels)
    each, last = (
        x.view(len(levels), -1, *x.shape[1:]) for x in (rule.contributions(joint), rule.last(joint))
    )
    for level, contributions, rates in zip(levels, each, last, strict=True):
        expected.append(before + (reach * rates).sum(-1))
        before = before + (reach * contributions).sum(-1)
        sampled.append(before)
        reach = reach * (contributions[:, :, None, :] * level.same_next).sum(-1)
    return torch.stack(sampled, -1), torch.stack(expected, -1)


def pooled(reach: Tensor, trunk: Tensor, gains: Tensor, layout: SuperTreeLayout) -> Tensor:
    """Estimates [T, A] from `reach`, `trunk` [T, L1 + 1] (E[tau] of the bare trunks) and `gains` [T
    * (L1 + 1), S, L2 + 1]: averaged over the subsets of K paths, single paths over the ways to
    split them.
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
    return value.flatten(1) @ _pooling(layout).to(value)


def of_first_path(estimates: Tensor) -> Tensor:
    """Estimates [..., 233] of single paths in place of every tree's, for a rule that verifies only
    the first path of a tree.
    """
    return estimates[..., [TREE_INDEX[Action(1, 0, tree.depth)] for tree in TREES]]


@cache
def _pooling(layout: SuperTreeLayout) -> Tensor:
    """[K (L1 + 1) (L2 + 1), A]: average of the estimates of equal trees, weighted by the paths each
    one averages.
    """
    actions, trees = action_space(layout.k, layout.l1, layout.l2)
    pooling = torch.zeros(len(actions), len(trees), dtype=torch.float64)
    for row, action in enumerate(actions):
        if action.k == 1 or action.l2 > 0:  # the bare trunk is the same estimate for every K
            pooling[row, trees.index(canonical(action))] = (
                layout.k if action.k == 1 and action.l2 else 1
            )
    return pooling / pooling.sum(0)
