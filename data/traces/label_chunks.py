"""Labels of a micro-batch of super-trees, which hold one chunk of distributions at a time.

Branch points are independent given the trunk's reach, so that only the rows of one branch point
have to be in memory together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.data.traces.super_trees import Draft, SuperTrees
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.names import ON_PATHS
from nde_talf.decoding.rules.labels import (
    Bundle,
    branch_gains,
    of_first_path,
    pooled,
    trunk_reach,
)
from nde_talf.decoding.sampling import SamplingSetting, warp
from nde_talf.decoding.super_tree import SuperTreeLayout

NUMBERS = 1 << 26
"""Numbers in one matrix of a chunk: 256 MB of float32. At its peak a chunk takes some five."""


def chunk_rows(vocabulary: int, layout: SuperTreeLayout) -> int:
    """Count rows of [V] numbers in a chunk: at least those of a branch point."""
    return max(NUMBERS // vocabulary, rows_together(layout))


def rows_together(layout: SuperTreeLayout) -> int:
    """Count rows that have to be held together: a branch point and the inner rows below it."""
    return 1 + layout.k * max(layout.l2 - 1, 0)


Key = tuple[int, str]
"""Number of a sampling setting, and name of a verification rule."""


@dataclass(frozen=True)
class _Inner:
    """The inner rows of super-trees, whose distributions are computed when they are asked for."""

    trees: SuperTrees
    target: CausalModel
    draft: CausalModel | Draft
    settings: list[tuple[SamplingSetting, SamplingSetting]]

    def distributions(self, tree: Tensor, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield i, p, q [n, V] of setting number i at `rows` [B, m] of trees number `tree` [B]."""
        p_logits = self.target.logits(self.trees.h_p[tree[:, None], rows].flatten(0, 1)).float()
        q_logits = self.draft.logits(self.trees.h_q[tree[:, None], rows].flatten(0, 1)).float()
        warped: dict[SamplingSetting, Tensor] = {}
        for i, (setting, draft_setting) in enumerate(self.settings):
            if draft_setting not in warped:
                warped = {draft_setting: warp(q_logits, draft_setting)}
            yield i, warp(p_logits, setting), warped[draft_setting]


@torch.inference_mode()
def labels(
    trees: SuperTrees,
    target: CausalModel,
    draft: CausalModel | Draft,
    settings: list[tuple[SamplingSetting, SamplingSetting]],
    verifiers: list[str],
    layout: SuperTreeLayout,
    chunk: int,
) -> list[dict[str, Tensor]]:
    """Estimate E[tau + 1] [T, A] by verifier, for every (target's, draft's) sampling setting.

    Args:
        trees: with the hidden states of both models.
        target: reads its states out.
        draft: reads its states out.
        settings: pairs that the labels are for.
        verifiers: names of rules.
        layout: of the trees.
        chunk: rows of distributions at a time, at least `rows_together(layout)`.

    Returns:
        For each setting, float32 estimates by the verifiers' names.
    """
    inner, device = _Inner(trees, target, draft, settings), trees.tokens.device
    rules = list(dict.fromkeys(ON_PATHS.get(name, name) for name in verifiers))
    numbers = torch.arange(len(trees.tokens), device=device)
    size = max(1, chunk // max(layout.l1, 1))
    trunks = _joined([_reach(inner, tree, rules, layout) for tree in numbers.split(size)], 1)
    points = torch.arange(len(numbers) * (layout.l1 + 1), device=device)
    size = max(1, chunk // rows_together(layout))
    gains = _joined([_gains(inner, at, trunks, layout) for at in points.split(size)], 0)
    estimates = {
        key: pooled(trunk[0], trunk[1], gains[key], layout).float() for key, trunk in trunks.items()
    }
    return [
        {
            name: of_first_path(estimates[i, ON_PATHS[name]])
            if name in ON_PATHS
            else estimates[i, name]
            for name in verifiers
        }
        for i in range(len(settings))
    ]


def _reach(
    inner: _Inner, tree: Tensor, rules: list[str], layout: SuperTreeLayout
) -> dict[Key, Tensor]:
    """Compute reach and bare-trunk labels [2, T', L1 + 1] of these trees."""
    tokens = inner.trees.tokens[tree, 1 : layout.l1 + 1]
    rows = torch.arange(layout.l1, device=tokens.device).expand(len(tree), -1)
    nodes = torch.arange(tokens.numel(), device=tokens.device)[:, None, None]
    reach = {}
    for i, p, q in inner.distributions(tree, rows):
        bundle = Bundle(p, q, tokens.flatten()[:, None, None], nodes)
        for rule in rules:
            reach[i, rule] = torch.stack(trunk_reach(bundle, len(tree), rule))
    return reach


def _gains(
    inner: _Inner, at: Tensor, trunks: dict[Key, Tensor], layout: SuperTreeLayout
) -> dict[Key, Tensor]:
    """Compute the gains of these branch points, which are numbered tree by tree."""
    paths, (inner_rows, local) = layout.paths.to(at.device), _branch_rows(layout)
    tree, point = at // len(paths), at % len(paths)
    rows = inner_rows.to(at.device)[point]
    tokens = inner.trees.tokens[tree[:, None, None], paths[point]]
    first = torch.arange(len(at), device=at.device)[:, None, None] * rows.shape[1]
    gains = {}
    for i, p, q in inner.distributions(tree, rows):
        bundle = Bundle(p, q, tokens, first + local.to(at.device))
        for setting, rule in trunks:
            if setting == i:
                reach = trunks[i, rule][0].flatten()[at]
                gains[i, rule] = branch_gains(bundle, reach, rule)
    return gains


def _joined(parts: list[dict[Key, Tensor]], dimension: int) -> dict[Key, Tensor]:
    return {key: torch.cat([part[key] for part in parts], dimension) for key in parts[0]}


def _branch_rows(layout: SuperTreeLayout) -> tuple[Tensor, Tensor]:
    """Number the rows of a branch point.

    Returns:
        [points, 1 + K (L2 - 1)]: each branch point's row and its branches' inner rows.
        [K, L2]: at which of them each draw was drawn, the branch point for the first level, else
        the draw before it on its path.
    """
    points = torch.arange(layout.l1 + 1)[:, None]
    rows = torch.cat([points, layout.paths[:, :, :-1].flatten(1)], -1)
    below = max(layout.l2 - 1, 0)
    inner = torch.arange(1, 1 + layout.k * below).view(layout.k, below)
    return rows, torch.cat([torch.zeros(layout.k, 1, dtype=torch.long), inner], -1)[:, : layout.l2]
