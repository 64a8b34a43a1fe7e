"""Expected block efficiency of every action from one super-tree (Eq. 3, paper 000): pure functions of p, q and tokens.

A top-down rule's reach probabilities do not depend on L2 and its trunk factor is shared, so depth-wise cumulative sums
over the bundle of paths behind each branch point give every (K, L1, L2) at once; for K < K_max the estimate is averaged
over all subsets of the paths. The bottom-up rules have gains of the same form (`traversal_gains`, `gbv_gains`).
"""

from functools import cache
from itertools import product

import torch
from torch import Tensor

from decoding.actions import action_space, canonical
from decoding.errors import UserError
from decoding.super_tree import SuperTreeLayout, super_tree_layout
from decoding.verification.acceptance import BRANCHING
from decoding.verification.bundles import Bundle, draws_by_row, levels, ratio
from decoding.verification.checks import check_pair_of_rows
from decoding.verification.gbv import gbv_gains
from decoding.verification.topdown import top_down_gains
from decoding.verification.traversal import traversal_gains

# On single paths the labels of naivetree are Naive's, and those of traversal are block verification's.
LABELLED = (*BRANCHING, "traversal", "gbv")


def expected_block_efficiency(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    verifier: str,
    layout: SuperTreeLayout | None = None,
    exact_last: bool = True,
    check: bool = True,
) -> Tensor:
    """Unbiased estimates [T, A] of E[tau + 1] for all A trees of the action space, one a super-tree.

    p, q: [T, N_inner, V] next-token distributions at the super-trees' inner rows; tokens [T, N] (the root's is not looked
    at); the columns are `decoding.actions.TREES` for the default layout, `action_space` gives them in general.
    Single paths are pooled over the ways to split them. exact_last: see `top_down_gains`; bottom-up rules do without.
    Raises UserError for a verifier without an estimator, ValueError for shapes that do not fit or, where `check`, for rows
    that are no distributions.
    """
    layout = layout or super_tree_layout()
    if verifier not in LABELLED:
        raise UserError(f"verifier={verifier}: it has no labels; choose one of {', '.join(LABELLED)}.")
    if p.dim() != 3 or p.shape[1] != layout.inner or tokens.shape != (len(p), len(layout)):
        raise ValueError(
            f"p, tokens: their shapes are {tuple(p.shape)} and {tuple(tokens.shape)}; for this layout expected "
            f"[T, {layout.inner}, V] and [T, {len(layout)}]."
        )
    if check:
        check_pair_of_rows(p.flatten(0, 1), q.flatten(0, 1))
    count, rows, _ = p.shape
    flat_p, flat_q = p.flatten(0, 1), q.flatten(0, 1)
    tree = torch.arange(count, device=p.device)[:, None, None, None]

    def bundle(paths: Tensor) -> Bundle:
        """paths [P, K, L] of row numbers -> the bundles of all super-trees, [T * P, K, L]."""
        nodes = (layout.parents.to(p.device)[paths] + tree * rows).flatten(0, 1)
        return Bundle(flat_p, flat_q, tokens[tree, paths].flatten(0, 1), nodes)

    alone = torch.ones(1, 1, dtype=torch.bool, device=p.device)
    subsets = torch.tensor(list(product((False, True), repeat=layout.k))[1:], device=p.device)
    # A trunk node has one child, so its levels are independent until they are multiplied up: one level of T * L1 bundles.
    trunk = list(levels(bundle(torch.arange(1, layout.l1 + 1, device=p.device).view(-1, 1, 1)), alone))
    branches = list(levels(bundle(layout.paths.to(p.device)), subsets))
    one = p.new_ones(count, 1, dtype=torch.float64)
    rule = BRANCHING[verifier](flat_p, flat_q, draws_by_row(trunk + branches, flat_p)) if verifier in BRANCHING else None
    if not layout.l1:
        reach, exact = one, torch.zeros_like(one)
    elif rule is not None:
        reach = torch.cat([one, rule.contributions(trunk[0]).view(count, -1)], -1).cumprod(-1)
        exact = torch.cat([0 * one, reach[:, :-1] * rule.last(trunk[0]).view(count, -1)], -1)
        exact[:, 2:] += reach[:, 1:-1].cumsum(-1)
    else:  # the weight that block verification arrives with
        px, qx = (x.view(count, -1) for x in (trunk[0].px, trunk[0].qx))
        weights = [one[:, 0]]
        for level in range(layout.l1):
            weights.append(ratio(weights[-1] * px[:, level], qx[:, level]))
        reach = torch.stack(weights, -1)
    sampled = reach.cumsum(-1) - 1
    if rule is None or not exact_last:
        exact = sampled
    start = reach.flatten()  # reach probability, or weight, at every branch point
    if not branches:
        gains = start.new_zeros(len(start), len(subsets), 1)
    elif rule is not None:
        gains = top_down_gains(rule, branches, start)[int(exact_last)]
    else:
        gains = (gbv_gains if verifier == "gbv" else traversal_gains)(branches, start)

    size = subsets.sum(-1)
    mean = torch.stack([(size == k).double() / (size == k).sum() for k in range(1, layout.k + 1)])  # [K, S]
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
