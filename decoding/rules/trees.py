"""B draft trees on a device, padded to one number of nodes: what the device drivers of all rules
read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.decoding.device_tree import DeviceTree

Rows = Callable[[Tensor], Tensor]
"""Node numbers [B] -> rows [B, V] of a distribution there."""


@dataclass
class Trees:
    """Node 0 is the root, and parents precede their children.

    tokens [B, N]: token ids.
    parents [B, N]: the first node of the parent's token; -1 for the root, -2 for padding.
    p, q: rows of the target and of the draft at one node of each tree. q is asked for at nodes with
    children only.
    depth: the largest depth that a node can have. max_draws: the largest number of draws that a
    node can have. left [B, N]: float64, the mass of q each node was drawn from; None for i.i.d.
    draws.
    """

    tokens: Tensor
    parents: Tensor
    p: Rows
    q: Rows
    depth: int
    max_draws: int
    left: Tensor | None = None

    def children(self, node: Tensor, wanted: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        """The draws at `node` [B]: tokens [B, n] in draft order, of which the first [B] are the
        node's own, and `left` of each [B, n]. wanted: False gives no tokens, for rules that offer
        none.
        """
        if not wanted:
            return self.tokens[:, :0], torch.zeros_like(node), None
        under = self.parents == node[:, None]
        order = under.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[
            :, : self.max_draws
        ]
        left = None if self.left is None else self.left.gather(1, order)
        return self.tokens.gather(1, order), under.sum(1), left

    def first(self) -> Tensor:
        """[B, N]: the first node that is the same draw under the same parent; the node itself if
        there is none before it.
        """
        same = (self.parents[:, :, None] == self.parents[:, None]) & (
            self.tokens[:, :, None] == self.tokens[:, None]
        )
        return same.to(torch.uint8).argmax(-1)

    def ancestors(self) -> Tensor:
        """[B, N, N]: whether node a is node n or above it, at [b, n, a]."""
        count = self.parents.shape[1]
        sees = (
            torch.eye(count, dtype=torch.bool, device=self.parents.device)
            .expand(len(self.parents), -1, -1)
            .clone()
        )
        above = self.parents
        for _ in range(self.depth):
            real = above >= 0
            sees |= (torch.arange(count, device=above.device) == above[..., None]) & real[..., None]
            above = torch.where(real, self.parents.gather(1, above.clamp(min=0)), above)
        return sees

    def before(self) -> Tensor:
        """[B, N, N]: whether node m comes before node n, at [b, n, m], where children come before
        their parent and siblings in draft order.
        """
        sees = self.ancestors().float()
        number = torch.arange(self.parents.shape[1], device=self.parents.device)
        siblings = (self.parents[:, :, None] == self.parents[:, None]) & (
            number[:, None] > number
        )  # [b, later, earlier]
        apart = (
            sees @ siblings.float() @ sees.mT > 0
        )  # n below the later one, m below the earlier one
        below = sees.mT > 0
        return apart | (below & ~torch.eye(len(number), dtype=torch.bool, device=number.device))


def trees_of(tree: DeviceTree) -> Trees:
    """One tree as a batch of one."""
    inner = torch.stack(
        [q for q in tree.q if q is not None] or [tree.p[0]]
    )  # a root alone needs none
    return Trees(
        tree.tokens[None],
        tree.parents[None],
        lambda at: tree.p.index_select(0, at),
        lambda at: inner.index_select(0, at.clamp(max=len(inner) - 1)),
        tree.depth,
        tree.max_draws,
        None if tree.left is None else tree.left[None],
    )
