"""Labels of a micro-batch of super-trees, which hold one chunk of distributions at a time.

Branch points are independent given the trunk's reach, so that only the rows of one branch point
have to be in memory together.
"""

from collections.abc import Callable, Iterator
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
ByRule = dict[tuple[int, str], Tensor]
"""By number of a sampling setting, and name of a verification rule."""


def chunk_rows(vocabulary: int, layout: SuperTreeLayout) -> int:
    """Count rows of [V] numbers in a chunk: at least those of a branch point."""
    return max(NUMBERS // vocabulary, _rows_together(layout))


def _rows_together(layout: SuperTreeLayout) -> int:
    """Count rows that have to be held together: a branch point and the inner rows below it."""
    return 1 + layout.k * max(layout.l2 - 1, 0)


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
        chunk: rows of distributions at a time, at least those of a branch point.

    Returns:
        For each setting, float32 estimates by the verifiers' names.
    """
    rules = list(dict.fromkeys(ON_PATHS.get(name, name) for name in verifiers))
    parts = _Parts(trees, target, draft, settings, rules, layout)
    trunks = parts.joined(parts.reach, len(trees.tokens), max(1, chunk // max(layout.l1, 1)), 1)
    points = len(trees.tokens) * (layout.l1 + 1)
    size = max(1, chunk // _rows_together(layout))
    gains = parts.joined(lambda at: parts.gains(at, trunks), points, size, 0)
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


@dataclass(frozen=True)
class _Parts:
    """Labels of some trunks or branch points, whose distributions are computed for them alone."""

    trees: SuperTrees
    target: CausalModel
    draft: CausalModel | Draft
    settings: list[tuple[SamplingSetting, SamplingSetting]]
    rules: list[str]
    layout: SuperTreeLayout

    def joined(
        self, part: Callable[[Tensor], ByRule], count: int, size: int, dimension: int
    ) -> ByRule:
        """Join what `part` gives for the numbers below `count`, `size` at a time."""
        numbers = torch.arange(count, device=self.trees.tokens.device)
        parts = [part(some) for some in numbers.split(size)]
        return {key: torch.cat([each[key] for each in parts], dimension) for key in parts[0]}

    def reach(self, tree: Tensor) -> ByRule:
        """Compute reach and bare-trunk labels [2, T', L1 + 1] of these trees."""
        tokens = self.trees.tokens[tree, 1 : self.layout.l1 + 1]
        rows = torch.arange(self.layout.l1, device=tree.device).expand(len(tree), -1)
        nodes = torch.arange(tokens.numel(), device=tree.device)[:, None, None]
        return {
            (i, rule): torch.stack(trunk_reach(bundle, len(tree), rule))
            for i, bundle in self._bundles(tree, rows, tokens.flatten()[:, None, None], nodes)
            for rule in self.rules
        }

    def gains(self, at: Tensor, trunks: ByRule) -> ByRule:
        """Compute the gains of these branch points, which are numbered tree by tree."""
        paths, (inner_rows, local) = self.layout.paths.to(at.device), _branch_rows(self.layout)
        tree, point = at // len(paths), at % len(paths)
        rows = inner_rows.to(at.device)[point]
        tokens = self.trees.tokens[tree[:, None, None], paths[point]]
        first = torch.arange(len(at), device=at.device)[:, None, None] * rows.shape[1]
        return {
            (i, rule): branch_gains(bundle, trunks[i, rule][0].flatten()[at], rule)
            for i, bundle in self._bundles(tree, rows, tokens, first + local.to(at.device))
            for rule in self.rules
        }

    def _bundles(
        self, tree: Tensor, rows: Tensor, tokens: Tensor, nodes: Tensor
    ) -> Iterator[tuple[int, Bundle]]:
        """Yield draws by setting, with p, q [n, V] at `rows` [B, m] of trees number `tree` [B]."""
        p_logits = self.target.logits(self.trees.h_p[tree[:, None], rows].flatten(0, 1)).float()
        q_logits = self.draft.logits(self.trees.h_q[tree[:, None], rows].flatten(0, 1)).float()
        warped: dict[SamplingSetting, Tensor] = {}
        for i, (setting, draft_setting) in enumerate(self.settings):
            if draft_setting not in warped:
                warped = {draft_setting: warp(q_logits, draft_setting)}
            yield i, Bundle(warp(p_logits, setting), warped[draft_setting], tokens, nodes)


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
