"""The draft tree: what a policy builds, the target scores and a verifier walks.

Node 0 is the root (the last committed token); parents precede children. A token that is drawn again under one parent
is the same node: `children[n]` lists n's draws in draft order, with repeats, as the OTLP solvers need them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoding.sampling import SamplingSetting, warp


@dataclass
class DraftTree:
    """Topology on the host, next-token distributions as tensors.

    tokens, parents, depth: one entry a node. q[n]: the distribution [V] from which n's children were drawn (None where
    the draft was not asked). left[n]: for each of children[n], the mass of q[n] that it was drawn from where children are
    drawn without replacement: the float64 sum over the tokens not drawn before it (None where it was not recorded). p[n]: the
    target's, there after the target pass.
    """

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    children: list[list[int]]
    q: list[Tensor | None]
    p: Sequence[Tensor] | None = None
    left: list[list[float | None]] = field(default_factory=list)
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self.left = self.left or [[None] * len(children) for children in self.children]

    @classmethod
    def rooted(cls, token: int, q: Tensor | None = None) -> "DraftTree":
        return cls([token], [-1], [0], [[]], [q])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, left: float | None = None) -> int:
        """Record the draw of `token` under `parent`, from the mass `left` of q; returns its node, the old one if it was drawn
        before."""
        node = self._nodes.get((parent, token))
        if node is None:
            node = self._nodes[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depth.append(self.depth[parent] + 1)
            self.children.append([])
            self.left.append([])
            self.q.append(None)
        self.children[parent].append(node)
        self.left[parent].append(left)
        return node

    def masses(self, node: int) -> list[float]:
        """`left` of the node, where children were drawn without replacement. What was not recorded is 1 for the first of them,
        and for others summed up here, in float64 as a draw does. 1 - q(x) would not do: where q(x) is near 1, it has no
        correct digit."""
        masses = [1.0 if at == 0 and recorded is None else recorded for at, recorded in enumerate(self.left[node])]
        if None in masses:
            rest = self.q[node].clone()
            for at, child in enumerate(self.children[node]):
                if masses[at] is None:
                    masses[at] = float(rest.sum(dtype=torch.float64))
                rest[self.tokens[child]] = 0
        return masses

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
    """Outcome of a verification: the last accepted node, 0 for the root, and the token after it. Numbers on the host;
    for B trees
    on a device tensors [B], where a negative token says that a row had no positive, finite sum."""

    end: Any
    token: Any


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
