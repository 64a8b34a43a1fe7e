"""Verification of many trees at once, for engines that batch sequences: `verify_batch`."""

from typing import Any

import torch

from decoding.verification.trees import Trees


def trees_of(tree: Any) -> Trees:
    """One tree on a device as a batch of one."""
    inner = torch.stack([q for q in tree.q if q is not None])
    levels = tree.levels[1:]
    left = None
    if any(level.left is not None for level in levels):
        parts = [
            torch.ones_like(level.token, dtype=torch.float64) if level.left is None else level.left for level in tree.levels
        ]
        left = torch.cat(parts)[None]
    most = max((level.most for level in levels), default=0) or len(tree)
    return Trees(
        tree.drafted[None],
        torch.where(torch.arange(len(tree), device=tree.above.device) > 0, tree.above, -1)[None],
        lambda at: tree.p.index_select(0, at),
        lambda at: inner.index_select(0, at.clamp(max=len(inner) - 1)),
        len(levels),
        most,
        left,
    )
