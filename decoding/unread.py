"""A draft tree whose tokens lie on the device: drafted, run by the target and verified before the host has seen one of them.

Every draw is a node of its own, as the host knows how many there are without knowing which repeat each other; which do is
worked out on the device, and the host merges them when it reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoding.device import upload
from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict


@dataclass
class Level:
    """The n nodes of one depth, numbered start, start + 1, ... All of [n], on the device: token; first: the first node that is
    the same draw under the same parent (a token drawn again is one node, which goes by its first draw); above: the parent's
    `first`. most: draws that one node can have. left (float64): the mass of q that each draw was made from (`DraftTree.left`),
    None where draws are i.i.d. or picked."""

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
        """[n]: how many draws at the same node came before this one."""
        return (self.above[:, None] == self.above).tril(-1).sum(1)

    def draws(self, upper: "Level") -> tuple[Tensor, Tensor]:
        """Tokens [m, most] drawn at each node of the level above, in draft order, and how many they are [m]; what comes behind
        those means nothing."""
        under = self.under(upper)
        return self.token[self._ordered(under)], under.sum(1)

    def masses(self, upper: "Level") -> Tensor:
        """[m, most]: of these draws what they were made from, 1 where draws are i.i.d."""
        if self.left is None:
            return torch.ones(len(upper.token), self.most, dtype=torch.float64, device=self.token.device)
        return self.left[self._ordered(self.under(upper))]

    def _ordered(self, under: Tensor) -> Tensor:
        """[m, most]: the draws at each node of the level above, in draft order, and then others."""
        return under.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : self.most]

    def under(self, upper: "Level") -> Tensor:
        """[m, n]: whether the draw was made at this node of the level above."""
        nodes = torch.arange(upper.rows.start, upper.rows.stop, device=self.above.device)
        return nodes[:, None] == self.above


class Committed(NamedTuple):
    """What a verdict commits, on the device. nodes [D + 1]: from the root to the last accepted node; tokens [D + 1]: those of
    nodes[1:], then the correction; root [1]: its index there, which is tau. What comes behind them means nothing."""

    nodes: Tensor
    tokens: Tensor
    root: Tensor

    @classmethod
    def along(cls, nodes: Tensor, root: Tensor, drafted: Tensor, token: Tensor) -> "Committed":
        """Given the tokens `drafted` [N] at all nodes and the correction `token` [1]."""
        taken = torch.cat([drafted.index_select(0, nodes[1:]), token])
        at = torch.arange(len(nodes), device=nodes.device)
        # No model takes a token that says that there is none.
        return cls(nodes, torch.where(at < root, taken, token.clamp(min=0)), root)


class UnreadTree:
    """What drafters and the target's pass see of a `DraftTree`, but that its `tokens` are tensors of no dimension. q is there
    at all nodes but those of the last level. p [N, V]: the target's distributions, there after its pass."""

    def __init__(self, root: int, q: Tensor):
        zero = torch.zeros(1, dtype=torch.long, device=q.device)
        token = upload(torch.tensor([root]), q.device)
        self.root, self.p = root, q.new_empty(0)
        self.levels = [Level(0, token, zero, zero - 1)]
        self.tokens, self.parents, self.q = [token[0]], [-1], [q]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> Tensor:
        """[N]: the tokens of all nodes."""
        return torch.cat([level.token for level in self.levels])

    @property
    def above(self) -> Tensor:
        """[N]: the parents' `first`; the root's is -1."""
        return torch.cat([level.above for level in self.levels])

    @property
    def tips(self) -> list[int]:
        """The nodes of the last level."""
        return list(range(self.levels[-1].start, len(self)))

    def draw(self, counts: list[int], rng: Rng) -> None:
        """So many i.i.d. draws at every tip, whose q have to be there."""
        tips, upper = self.tips, self.levels[-1]
        parents = [tip for tip, count in zip(tips, counts, strict=True) for _ in range(count)]
        above = upper.first.index_select(0, upload(torch.tensor(parents) - upper.start, upper.first.device))
        # Tips that are the same node draw from the same row, so that its q is exactly what its children were drawn from.
        token = rng.categorical(torch.stack([self.q[tip] for tip in tips]).index_select(0, above - upper.start))
        self.add(token, above, parents, len(parents))

    def pick(self, counts: list[int], take: Callable[[Tensor, int], tuple[Tensor, Tensor | None]]) -> None:
        """At every tip the first so many of the tokens [m, most] that `take` finds in rows of q [m, V]: different ones, while
        there is mass in q. With them the mass [m, most] that each was drawn from, or None for tokens that were not drawn."""
        wanted, most = [(tip, count) for tip, count in zip(self.tips, counts, strict=True) if count], max(counts)
        tokens, left = (x if x is None else x.flatten() for x in take(torch.stack([self.q[tip] for tip, _ in wanted]), most))
        places = [row * most + at for row, (_, count) in enumerate(wanted) for at in range(count)]
        parents = [tip for tip, count in wanted for _ in range(count)]
        places, above = upload(torch.tensor([places, parents]), tokens.device).unbind()
        self.add(tokens.index_select(0, places), above, parents, most, left if left is None else left.index_select(0, places))

    def add(self, token: Tensor, above: Tensor, parents: list[int], most: int = 1, left: Tensor | None = None) -> None:
        """A level of the draws `token` [n] at the nodes `above` [n], which are `parents` but for repeated draws."""
        start = len(self)
        same = (above[:, None] == above) & (token[:, None] == token)
        self.levels.append(Level(start, token, same.to(torch.uint8).argmax(1) + start, above, most, left))
        self.tokens += token.unbind()
        self.parents += parents
        self.q += [None] * len(token)

    def committed(self, end: Tensor, token: Tensor) -> Committed:
        """Given the last accepted node `end` [1] and the correction `token` [1]."""
        deep, ways = len(self.levels) - 1, [[0] * (len(self.levels) + 1)]  # of each node: itself and those above; its depth
        for node, parent in enumerate(self.parents[1:], 1):
            depth = ways[parent][-1] + 1
            ways.append([*ways[parent][:depth], *[node] * (deep + 1 - depth), depth])
        way = upload(torch.tensor(ways), end.device).index_select(0, end)[0]
        return Committed.along(way[:-1], way[-1:], self.drafted, token)

    def read(
        self, end: Tensor, token: Tensor, choice: Tensor | None = None
    ) -> tuple[DraftTree, list[int], Verdict, int | None]:
        """Wait for the device, once: the tree with its repeated draws merged, of each of its nodes the node here, the
        verdict, given the last accepted node `end` [1] and the correction `token` [1], and `choice` [1]."""
        levels = [level for level in self.levels if level.left is not None]
        parts = [*(level.left.view(torch.long) for level in levels), *(level.token for level in self.levels)]
        *numbers, last, correction, chosen = torch.cat([*parts, end, token, end if choice is None else choice]).tolist()
        tokens, left = numbers[-len(self) :], [None] * len(self)
        drawn = [node for level in levels for node in range(level.rows.start, level.rows.stop)]
        for node, mass in zip(drawn, np.array(numbers[: len(drawn)], np.int64).view(np.float64).tolist(), strict=True):
            left[node] = mass
        tree, merged, nodes = DraftTree.rooted(self.root, self.q[0]), [0], [0]
        for node in range(1, len(tokens)):
            merged.append(tree.add(merged[self.parents[node]], tokens[node], left[node]))
            if merged[-1] == len(nodes):
                nodes.append(node)
                tree.q[-1] = self.q[node]
        rows = self.p.unbind()
        tree.p = [rows[node] for node in nodes]
        return tree, nodes, Verdict(merged[last], correction), None if choice is None else chosen
