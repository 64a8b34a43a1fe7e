"""Expected block efficiency of every action from one super-tree (Eq. 3, paper 000): pure functions of p, q and tokens.

A top-down rule's reach probabilities do not depend on L2 and its trunk factor is shared, so depth-wise cumulative sums
over the bundle of paths behind each branch point give every (K, L1, L2) at once; for K < K_max the estimate is averaged
over all subsets of the paths. The bottom-up rules have gains of the same form (`traversal_gains`, `gbv_gains`).
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import torch
from torch import Tensor

from decoding.actions import action_space, canonical
from decoding.errors import UserError
from decoding.super_tree import SuperTreeLayout, super_tree_layout
from decoding.verification.acceptance import BRANCHING
from decoding.verification.bundles import Bundle, Level, draws_by_row, levels
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
    trunk = list(levels(bundle(torch.arange(1, layout.l1 + 1, device=p.device).view(1, 1, -1)), alone))
    branches = list(levels(bundle(layout.paths.to(p.device)), subsets))
    start = p.new_ones(count, dtype=torch.float64)
    nothing = start.new_zeros(count, 1, 1)
    rule = BRANCHING[verifier](flat_p, flat_q, draws_by_row(trunk + branches, flat_p)) if verifier in BRANCHING else None

    def gains_of(part: list[Level], start: Tensor, gains: Callable) -> tuple[Tensor, Tensor]:
        """Sampled gains, which reach probabilities follow from, and those to estimate with."""
        if not part:
            return nothing, nothing
        if rule is None:
            return (found := gains(part, start)), found
        sampled, expected = top_down_gains(rule, part, start)
        return sampled, expected if exact_last else sampled

    sampled, exact = (x[:, 0] for x in gains_of(trunk, start, traversal_gains))
    reach = torch.cat([start[:, None], sampled.diff(dim=-1)], -1).flatten()  # or weight, at every branch point
    _, gains = gains_of(branches, reach, gbv_gains if verifier == "gbv" else traversal_gains)
    if not branches:
        gains = nothing.expand(count * (layout.l1 + 1), len(subsets), 1)

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
