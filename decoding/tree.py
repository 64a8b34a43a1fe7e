"""The draft tree: what a policy builds, the target scores and a verifier walks.

Node 0 is the root, the last committed token. Parents come before their children.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.device import upload
from nde_talf.decoding.sampling.rng import SamplingSetting, warp
from nde_talf.decoding.sampling.sampling_setting import feature_setting


@dataclass
class DraftTree:
    """A tree on the host; its distributions are tensors.

    A token that is drawn again under one parent is the same node.

    Attributes:
        tokens, parents, depth: one entry a node.
        children: of every node its draws in draft order, with repeats, as the rules of verification
            need them.
        q: of every node the distribution [V] that its children were drawn from; None where the
            draft was not asked.
        left: for each of children[n], the mass of q[n] that it was drawn from where children are
            drawn without replacement: the float64 sum over the tokens not drawn before it. None
            where it was not recorded.
        p: of every node the target's distribution [V], after the target's pass.
        nodes: gives a rule a node by number, as in the table that a recorded step made on the GPU
            (`rules.verification_table`); None: the rule makes it.
    """

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    children: list[list[int]]
    q: list[Tensor | None]
    p: "Sequence[Tensor] | WarpedRows" = ()
    left: list[list[float | None]] = field(default_factory=lambda: [[]])
    nodes: Callable[[int], Any] | None = None
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @classmethod
    def rooted(cls, token: int, q: Tensor | None = None) -> "DraftTree":
        """The tree of the root alone."""
        return cls([token], [-1], [0], [[]], [q])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, left: float | None = None) -> int:
        """Record the draw of `token` under `parent`, from the mass `left` of q; return its node.

        A token that was drawn there before keeps its node. Raises TypeError for a token that is no
        integer.
        """
        token = index(token)  # a tensor would be equal to no other token, stop tokens included
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

    def q_at(self, node: int) -> Tensor:
        """Q [V] at a node that has been expanded."""
        row = self.q[node]
        assert row is not None, f"node {node} has not been expanded"
        return row

    def q_rows(self, nodes: list[int]) -> Tensor:
        """Return q [n, V] at expanded nodes."""
        return torch.stack([self.q_at(node) for node in nodes])

    def p_rows(self) -> Tensor:
        """Return p [N, V] at all nodes."""
        rows = self.p
        return rows.all() if isinstance(rows, WarpedRows) else torch.stack([*rows])

    @property
    def device(self) -> torch.device:
        """The device of `p`."""
        return (self.p.logits if isinstance(self.p, WarpedRows) else self.p[0]).device

    def masses(self, node: int) -> list[float]:
        """`left` of the node, where children were drawn without replacement.

        What was not recorded is 1 for the first of them, and for others summed up here, in float64
        as a draw does. 1 - q(x) would not do: where q(x) is near 1, it has no correct digit.
        """
        masses: list[float] = []
        for at, mass in enumerate(self.left[node]):
            if mass is None and at:
                rest = self.q_at(node).clone()
                rest[[self.tokens[child] for child in self.children[node][:at]]] = 0
                mass = float(rest.sum(dtype=torch.float64))
            masses.append(1.0 if mass is None else mass)
        return masses

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def score(self, logits: Tensor, setting: SamplingSetting) -> "WarpedRows":
        """Set `p` from the target's `logits` [N, V], and return it."""
        self.p = rows = WarpedRows(logits, setting)
        return rows

    def commit(self, end: int, token: int) -> "Accepted":
        """Commit the path to the last accepted node `end`, and `token` after it."""
        path = self.path(end)
        return Accepted(self, path, [*(self.tokens[node] for node in path), index(token)])


class Accepted(NamedTuple):
    """Result of a verdict on a `DraftTree`: accepted nodes below the root, and committed tokens.

    The last token is the target's.
    """

    tree: DraftTree
    path: list[int]
    tokens: list[int]

    def of(self, states: Tensor) -> Tensor:
        """Select from `states` [N, ...] those at the old root and at the accepted nodes."""
        return states.index_select(0, upload(torch.tensor([0, *self.path]), states.device))


class Verdict(NamedTuple):
    """Outcome of a verification: the last accepted node, 0 for the root, and the token after it."""

    end: int
    token: int


class WarpedRows:
    """Rows of warp(logits), computed when looked at.

    A top-down verifier visits only tau + 1 of the N nodes.
    """

    def __init__(self, logits: Tensor, setting: SamplingSetting):
        self.logits, self.setting = logits, setting
        self._rows: dict[int, Tensor] = {}

    def __getitem__(self, node: int) -> Tensor:
        if node not in self._rows:
            self._rows[node] = warp(self.logits[node], self.setting)
        return self._rows[node]

    def all(self) -> Tensor:
        """Return all rows [N, V]."""
        rows = warp(self.logits, self.setting)
        self._rows = dict(enumerate(rows.unbind()))
        return rows

    def seen(self, node: int) -> Tensor:
        """Return the distribution for selector features."""
        look = feature_setting(self.setting)
        return self[node] if look is self.setting else warp(self.logits[node], look)
