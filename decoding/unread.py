"""Bridge to `decoding.verification.unread`, which reads trees by levels. To be deleted with it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.device_tree import DeviceTree


class UnreadTree(DeviceTree):
    def add(self, tokens: Tensor, parents: Tensor, max_draws=1, left: Tensor | None = None) -> None:
        super().add(tokens, parents, 1 if isinstance(max_draws, list) else max_draws, left)


def levels(tree: DeviceTree) -> "list[Level]":
    if not tree.starts:
        nodes = tree.first
        below = Level(1, tree.tokens[1:], nodes[1:], tree.parents[1:], 1)
        return [Level(0, tree.tokens[:1], nodes[:1], tree.parents[:1]), *[below] * tree.depth]
    found = []
    for start, stop in zip(tree.starts, [*tree.starts[1:], len(tree)], strict=True):
        at = slice(start, stop)
        left = None if tree.left is None else tree.left[at]
        found.append(Level(start, tree.tokens[at], tree.first[at], tree.parents[at], min(tree.max_draws, stop - start), left))
    return found


@dataclass
class Level:
    start: int
    token: Tensor
    first: Tensor
    above: Tensor
    most: int = 0
    left: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + len(self.token))

    def earlier(self) -> Tensor:
        return (self.above[:, None] == self.above).tril(-1).sum(1)

    def draws(self, upper: "Level") -> tuple[Tensor, Tensor]:
        under = self.under(upper)
        return self.token[self._ordered(under)], under.sum(1)

    def masses(self, upper: "Level") -> Tensor:
        if self.left is None:
            return torch.ones(len(upper.token), self.most, dtype=torch.float64, device=self.token.device)
        return self.left[self._ordered(self.under(upper))]

    def _ordered(self, under: Tensor) -> Tensor:
        return under.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : self.most]

    def under(self, upper: "Level") -> Tensor:
        nodes = torch.arange(upper.rows.start, upper.rows.stop, device=self.above.device)
        return nodes[:, None] == self.above
