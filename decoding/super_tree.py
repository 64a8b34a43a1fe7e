"""The super-tree: one sampled tree that holds a sample of every action's delayed tree.

A trunk of L1_max draws and, from each of its L1_max + 1 nodes, K_max i.i.d. paths of L2_max: 296
drafted nodes for the default action space, against 4,536 if every action drafted its own. Repeated
tokens stay separate rows here (the shape is fixed, so the mask is a constant); labels merge them
logically.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nde_talf.decoding.actions import K_MAX, L1_MAX, L2_MAX


@dataclass(frozen=True)
class SuperTreeLayout:
    """Row numbers and topology of a super-tree.

    Row 0 is the root, rows 1..l1 the trunk, then come the branches level by level. So the leaves,
    whose own distributions are not needed, come last.

    parents, depth: [N]; ancestors: [N, N] bool, row n's ancestors and itself; paths: [l1 + 1, k,
    l2] row numbers of the branches, by branch point (= number of trunk tokens before it), path and
    level; inner: rows that are no leaves.
    """

    k: int
    l1: int
    l2: int
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    paths: Tensor
    inner: int

    def __len__(self) -> int:
        return len(self.parents)


@cache
def super_tree_layout(k: int = K_MAX, l1: int = L1_MAX, l2: int = L2_MAX) -> SuperTreeLayout:
    """Make the layout of (l1 + 1)(1 + k l2) rows."""
    points = l1 + 1
    paths = (points + torch.arange(points * k * l2)).view(l2, points, k).permute(1, 2, 0)
    parents = torch.empty(points * (1 + k * l2), dtype=torch.long)
    parents[:points] = torch.arange(-1, l1)
    parents[paths[:, :, 1:]] = paths[:, :, :-1]
    if l2:
        parents[paths[:, :, 0]] = torch.arange(points)[:, None].expand(points, k)
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents[1:].tolist(), 1):
        ancestors[row] |= ancestors[parent]
    depth = ancestors.sum(1) - 1
    return SuperTreeLayout(k, l1, l2, parents, depth, ancestors, paths, int(parents.max()) + 1)
