"""Decisions are there for all nodes at once; what is accepted is found by following them down from the root."""

import torch
from torch import Tensor

from decoding.ranked import RankedTree
from decoding.unread import UnreadTree


def follow(tree: UnreadTree | RankedTree, hit: Tensor) -> Tensor:
    """The node [1] that is reached from the root by going to the first child that is `hit` [N], while there is one."""
    end = tree.levels[0].first
    for level in tree.levels[1:]:
        hits = hit[level.rows] & (level.above == end)
        end = torch.where(hits.any(), level.first.index_select(0, hits.to(torch.uint8).argmax(0, keepdim=True)), end)
    return end


def checked(tokens: Tensor, rows: Tensor) -> Tensor:
    """`tokens` [n], -1 where the row [n, V] it was drawn from has no positive, finite sum."""
    total = rows.sum(-1)
    return torch.where((total > 0) & torch.isfinite(total), tokens, -1)
