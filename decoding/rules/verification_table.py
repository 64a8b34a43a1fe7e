"""Verification by one transfer: all numbers that a walk may look at, of every node at once.

On a GPU each number that the host reads is a wait. So the device computes p and q at the drafted
tokens, the mass of the residual after each rejection and a token drawn from the last residual, and
one transfer brings them. Rules walk unchanged, over nodes that look these up.
"""

import math
from collections import Counter
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.device import asynchronous, upload
from nde_talf.decoding.rules.residual import EMPTY, Node, Residual, accept, node_of, reject
from nde_talf.decoding.sampling.device_rng import inverse_cdf, massless
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree

LEAST = 1e-36
"""A weight below it counts as this, so that c over a weight is a float32 number."""


class Rows(NamedTuple):
    """A tree's rows, one for each draw, in the form that `reject` takes.

    Shapes depend on arguments' shapes alone and no number is read, so that a CUDA graph can hold
    all of it. Draws that coincide keep rows of their own.

    Attributes:
        p: [n, V].
        q: [n, V]; at rows without draws its numbers do not matter.
        w0: [n], weights with which rows are reached; all 1 except under Traversal.
        tokens: [n].
        above: [n], the row that each was drawn below, of coinciding ones the first; -1 for the root
            and for rows of padding.
    """

    p: Tensor
    q: Tensor
    w0: Tensor
    tokens: Tensor
    above: Tensor

    def mass(self, c: Tensor, w0: Tensor) -> Tensor:
        """Return sum_t (w0 p(t) - c q(t))_+ [n], in float64."""
        return w0 * self.rest(c).sum(-1, dtype=torch.float64)

    def rest(self, c: Tensor) -> Tensor:
        """Return weights [n, V] in proportion to (w0 p - c q)_+."""
        return self.p.addcmul(self.q, (c / self.w0).to(self.p)[:, None], value=-1).clamp_(min=0)

    def states(self, most: int) -> Tensor:
        """Return the `Residual`s after 0 to `most` rejections, [n, most + 1, 3]."""
        none = torch.zeros_like(self.w0)
        states = [Residual(none, none, none + 1)]  # a mass of 0: nothing was drawn
        for _ in range(most):
            states.append(reject(self, states[-1], self.w0))
        numbers = [each for state in states for each in state]
        return torch.stack(numbers, 1).view(-1, most + 1, 3)

    def reach(self, draws: Any, most: int) -> None:
        """Set the weights with which rows `draws` of a level are reached (Traversal).

        Args:
            draws: a slice or a tensor; the level before has its weights.
            most: draws below a row.
        """
        tokens, above = self.tokens[draws], self.above[draws]
        p, q, w0 = (each[above] for each in self[:3])
        rows = Rows(p, q, w0, tokens, above)
        before = (above[:, None] == above).tril(-1).sum(1, keepdim=True)
        c, _, d = (each.gather(1, before) for each in rows.states(most - 1).unbind(2))
        px, qx = (each.gather(1, tokens[:, None]) for each in rows[:2])
        reached = accept(px, qx, Residual(c, None, d), rows.w0[:, None])
        self.w0[draws] = reached[:, 0].clamp(min=LEAST)

    def table(self, uniforms: Tensor, most: int) -> Tensor:
        """Draw a token at each row from its last residual, or from p where nothing is left.

        The weights of these draws take the place of q.

        Args:
            uniforms: [n], by which tokens are drawn.
            most: draws of a row that the rule looks at.

        Returns:
            Of each row what `TableNode` looks up: its token, p and q of this at the row above, the
            mass that a token is drawn from, that token, and what is left after 1 to `most`
            rejections.
        """
        states, rows = self.states(most), torch.arange(len(self.p), device=self.p.device)
        px, qx = (each[self.above, self.tokens] for each in self[:2])
        if most:
            draws = (self.above == rows[:, None]).sum(1).clamp(max=most)
            c, left, _ = states[rows, draws].unbind(1)
            torch.where((left <= EMPTY)[:, None], self.p, self.rest(c), out=self.q)
        else:
            self.q.copy_(self.p)
        total, drawn = self.q.sum(1, dtype=torch.float64), inverse_cdf(self.q, uniforms[:, None])
        columns = torch.stack([self.tokens, px, qx, total, drawn[:, 0]], 1)
        return torch.cat([columns, states[:, 1:, 1]], 1)


class TableNode(Node):
    """One node as rules see it, of a table; it is walked once.

    Args:
        lines: of `Rows.table`, on the host.
        weights: [n, V], that tokens were drawn from: q's place.
        tree: of the table's draws.
        row: the first row of each node, by the node's number.
        number: of this node.
    """

    def __init__(
        self,
        lines: list[list[float]],
        weights: Tensor,
        tree: DraftTree,
        row: dict[int, int],
        number: int,
    ):
        _, _, _, self.mass_left, token, *left = lines[row[number]]
        self.token, self.weights, self.masses = int(token), weights[row[number]], iter(left)
        children = tree.children[number]
        numbers = {tree.tokens[child]: lines[row[child]][1:3] for child in children}
        p, q = ({token: each[at] for token, each in numbers.items()} for at in range(2))
        super().__init__(p, q, [tree.tokens[child] for child in children])

    def mass(self, c: float, w0: float = 1.0) -> float:
        """Return the residual's mass after one more rejection."""
        return next(self.masses)

    def rest(self, c: float, w0: float = 1.0) -> Any:
        """Return nothing: a token was drawn already."""

    def draw(self, weights: Any, rng: Rng, w0: float = 1.0) -> int:
        """Return the token drawn from the last residual."""
        if not math.isfinite(self.mass_left):
            raise massless(self.mass_left)
        return rng.pick(self.token, self.weights)


def nodes_of(tree: DraftTree, rng: Rng, offered: int | None = None, bottom_up: bool = False) -> Any:
    """Return a function from a node's number to the node, in a tree of i.i.d. draws.

    The rule's states are `Residual`s. On a GPU one transfer brings the numbers of all nodes, unless
    the tree came with them; elsewhere a node is computed when the rule visits it.

    Args:
        tree: with p and q on one device.
        rng: draws a residual token at each node.
        offered: how many draws the rule looks at; None: all.
        bottom_up: nodes are reached with a weight (Traversal).
    """
    if tree.nodes is not None:
        return tree.nodes
    if len(tree) == 1 or not asynchronous(tree.device):
        return partial(node_of, tree)
    nodes, above, row = [0], [-1], dict[int, int]()
    for at, node in enumerate(nodes):  # level by level
        if node not in row:
            row[node] = at
            nodes += tree.children[node]
            above += [at] * len(tree.children[node])
    numbers = nodes, [tree.tokens[node] for node in nodes], above, rng.ahead(len(nodes))
    sent = upload(torch.tensor(numbers, dtype=torch.float64), tree.device)
    order, *places = sent[:3].long()
    most = max(map(len, tree.children)) if offered is None else offered
    p = tree.p_rows()[order]
    q = tree.q_rows([node if tree.children[node] else 0 for node in nodes]) if most else p
    rows = Rows(p, q, torch.ones_like(sent[3]), *places)
    if bottom_up:
        for _, level in groupby(range(1, len(nodes)), lambda at: tree.depth[nodes[at]]):
            first, *others = level
            draws = slice(first, first + 1 + len(others))
            rows.reach(draws, max(Counter(above[draws]).values()))
    return partial(TableNode, rows.table(sent[3], most).tolist(), q, tree, row)
