"""A draft tree of the most probable nodes, chosen on the device: the host knows how many there are and how deep they lie at
most; whose children they are it reads with their tokens.
"""

import torch
from torch import Tensor

from decoding.tree import DraftTree, Verdict
from decoding.unread import Committed, Level


class RankedTree:
    """What the target's pass and the rules for chosen trees see of a `DraftTree`. On the device: drafted [N], the tokens, also
    one by one in `tokens`; above [N]: the parents, which precede their children; node 0 is the root, and its own parent. No two
    children of a node have the same token. depth: the most that there can be. sees [N, N]: which nodes are on the way from the
    root to each one, itself included. p [N, V]: the target's distributions, there after its pass. Of q there is the root's.
    """

    def __init__(self, root: int, q: Tensor, drafted: Tensor, above: Tensor, depth: int):
        self.root, self.q, self.p, self.drafted, self.above = root, q, q.new_empty(0), drafted, above
        self.tokens = list(drafted.unbind())
        nodes = torch.arange(len(drafted), device=above.device)
        # Below the root, a node of any depth may be any of them.
        below = Level(1, drafted[1:], nodes[1:], above[1:])
        self.levels = [Level(0, drafted[:1], nodes[:1], above[:1] - 1), *[below] * depth]
        ways = [nodes]
        for _ in range(depth):
            ways.append(above.index_select(0, ways[-1]))
        self.ways = torch.stack(ways, 1)  # [N, depth + 1]: up to the root, and from there on the root
        blank = torch.zeros(len(drafted), len(drafted), dtype=torch.bool, device=above.device)
        self.sees = blank.scatter_(1, self.ways, True)

    def __len__(self) -> int:
        return len(self.tokens)

    def committed(self, end: Tensor, token: Tensor) -> Committed:
        """See `UnreadTree.committed`."""
        way = self.ways.index_select(0, end)[0]
        root = (way > 0).sum(0, keepdim=True)
        nodes = way.index_select(0, (root - torch.arange(len(way), device=way.device)).clamp(min=0))
        return Committed.along(nodes, root, self.drafted, token)

    def read(
        self, end: Tensor, token: Tensor, choice: Tensor | None = None
    ) -> tuple[DraftTree, list[int], Verdict, int | None]:
        """See `UnreadTree.read`."""
        numbers = torch.cat([self.drafted, self.above, end, token, end if choice is None else choice]).tolist()
        last, correction, chosen = numbers[-3:]
        tree = DraftTree.rooted(self.root, self.q)
        for node in range(1, len(self)):
            tree.add(numbers[len(self) + node], numbers[node])
        tree.p = self.p.unbind()
        return tree, list(range(len(self))), Verdict(last, correction), None if choice is None else chosen
