"""The draft tree: what a policy builds, the target scores and a verifier walks.

Node 0 is the root (the last committed token); parents precede children. A token that is drawn again under one parent
is the same node: `children[n]` lists n's draws in draft order, with repeats, as the OTLP solvers need them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from decoding.sampling import SamplingSetting, warp


@dataclass
class DraftTree:
    """Topology on the host, next-token distributions as tensors.

    tokens, parents, depth: one entry a node. q[n]: the distribution [V] from which n's children were drawn (None where
    the draft was not asked). p[n]: the target's, there after the target pass.
    """

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    children: list[list[int]]
    q: list[Tensor | None]
    p: Sequence[Tensor] | None = None
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @classmethod
    def rooted(cls, token: int, q: Tensor | None = None) -> "DraftTree":
        return cls([token], [-1], [0], [[]], [q])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Record the draw of `token` under `parent`; returns its node, the old one if it was drawn before."""
        node = self._nodes.get((parent, token))
        if node is None:
            node = self._nodes[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depth.append(self.depth[parent] + 1)
            self.children.append([])
            self.q.append(None)
        self.children[parent].append(node)
        return node

    def way(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def of(self, nodes: list[int]) -> "DraftTree":
        """The tree of these nodes alone: the root first, every parent before its children."""
        tree = DraftTree.rooted(self.tokens[0], self.q[0])
        renamed = {nodes[0]: 0}
        for node in nodes[1:]:
            renamed[node] = tree.add(renamed[self.parents[node]], self.tokens[node])
            tree.q[-1] = self.q[node]
        return tree


class Verdict(NamedTuple):
    """Outcome of a verification: accepted nodes below the root, top to bottom (tau of them), and the token after."""

    path: list[int]
    token: int


class WarpedRows:
    """Rows of warp(logits), computed when looked at: a top-down verifier visits only tau + 1 of the N nodes."""

    def __init__(self, logits: Tensor, setting: SamplingSetting):
        self.logits, self.setting = logits, setting
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, node: int) -> Tensor:
        row = self._rows.get(node)
        if row is None:
            row = self._rows[node] = warp(self.logits[node], self.setting)
        return row
