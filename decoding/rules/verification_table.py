"""Verification by one transfer: all numbers that a walk may look at, of every node at once.

On a GPU each number that the host reads is a wait. So the device computes p and q at the drafted
tokens, the mass of the residual after each rejection and a token drawn from the last residual, and
one transfer brings them. Rules walk unchanged, over nodes that look these up.
"""

import math
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.device import asynchronous, upload
from nde_talf.decoding.rules.residual import EMPTY, Residual, accept, node_of, reject
from nde_talf.decoding.sampling.device_rng import inverse_cdf, massless
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree

LEAST = 1e-36
"""A weight below it counts as this, so that c over a weight is a float32 number."""


class _Rows(NamedTuple):
    """Rows p, q [n, V] of nodes, in the form that `reject` takes; w0: of each its weight [n]."""

    p: Tensor
    q: Tensor

    def mass(self, c: Tensor, w0: Tensor) -> Tensor:
        """Return sum_t (w0 p(t) - c q(t))_+ [n], in float64."""
        return w0 * self.rest(c, w0).sum(-1, dtype=torch.float64)

    def rest(self, c: Tensor, w0: Tensor) -> Tensor:
        """Return weights [n, V] in proportion to (w0 p - c q)_+."""
        return self.p.addcmul(self.q, (c / w0).to(self.p)[:, None], value=-1).clamp_(min=0)


class VerificationTable:
    """Numbers of a tree of up to N rows, a row for each draw; draws that coincide keep their rows.

    Shapes depend on arguments' shapes alone, all tensors keep their addresses, and no number is
    read, so that a CUDA graph can hold the methods.

    Args:
        tokens: [N], drawn at each row.
        children: [N, K], the rows drawn below each row, in draft order, then N. What is drawn below
            draws that coincide belongs to the first of them.

    Attributes:
        weights: [N + 1], with which rows are reached; all 1 except under Traversal. The last entry
            takes what is written for draws that are not there.
        c: [N], coefficients of the last residuals.
        left: [N], their masses; 0 at rows without draws.
        numbers: [N, K, 3], p and q at each draw, and the residual's mass after its rejection.
    """

    def __init__(self, tokens: Tensor, children: Tensor):
        self.tokens, self.children = tokens, children
        self.c = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        self.left, self.weights = torch.zeros_like(self.c), self.c.new_ones(len(tokens) + 1)
        self.numbers = self.c.new_zeros(*children.shape, 3)

    def clear(self) -> None:
        """Make room for another tree."""
        self.children.fill_(len(self.tokens))
        self.weights.fill_(1)
        self.left.zero_()

    def reject(self, p: Tensor, q: Tensor, rows: Tensor, most: int, bottom_up: bool) -> None:
        """Fill in what is left at `rows` [n] after each of up to `most` rejected draws.

        Args:
            p: [n, V], the target's distributions there.
            q: [n, V], the draft's; numbers at rows without draws do not matter.
            rows: of one level, unless nodes are reached with 1.
            most: draws of a row that the rule looks at.
            bottom_up: draws are reached with a weight (Traversal).
        """
        children = self.children.index_select(0, rows)[:, :most]
        there = children < len(self.tokens)
        tokens = torch.where(there, children, 0).flatten()
        tokens = self.tokens.index_select(0, tokens).view_as(children)
        px, qx = (each.gather(1, tokens).double() for each in (p, q))
        w0 = self.weights.index_select(0, rows)
        none = torch.zeros_like(w0)
        states = [Residual(none, none, none + 1)]  # a mass of 0: nothing was drawn
        for _ in range(most):
            states.append(reject(_Rows(p, q), states[-1], w0))
        c, z, d = (torch.stack(each, 1) for each in zip(*states, strict=True))
        drawn = there.sum(1, keepdim=True)
        for last, each in ((self.c, c), (self.left, z)):
            last.index_copy_(0, rows, each.gather(1, drawn)[:, 0])
        self.numbers[:, :most].index_copy_(0, rows, torch.stack([px, qx, z[:, 1:]], -1))
        if bottom_up:
            before = Residual(c[:, :-1], None, d[:, :-1])
            reached = accept(px, qx, before, w0[:, None]).clamp(min=LEAST)
            self.weights.index_copy_(0, children.flatten(), reached.flatten())

    def finish(self, p: Tensor, q: Tensor, most: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token at each row from its last residual, or from p where nothing is left.

        Args:
            p: [n, V], at the first rows; all with draws have been through `reject`.
            q: [n, V].
            most: see `reject`.
            uniforms: [n], by which tokens are drawn.

        Returns:
            Of each of the n rows of p (`TableNode.numbers`) the mass that it is drawn from, the
            token, its own token, and `most` times `numbers`; then the weights [n, V] of the draw.
        """
        count = len(p)
        rest = _Rows(p, q).rest(self.c[:count], self.weights[:count])
        rest = torch.where((self.left[:count] <= EMPTY)[:, None], p, rest)
        columns = (
            rest.sum(-1, dtype=torch.float64)[:, None],
            inverse_cdf(rest, uniforms[:, None]).double(),
            self.tokens[:count, None].double(),
            self.numbers[:count, :most].flatten(1),
        )
        return torch.cat(columns, 1), rest


class TableNode:
    """One node as rules see it (`residual.Node`), of a table; it is walked once.

    Args:
        lines: of a finished table, on the host.
        weights: [N, V], that tokens were drawn from.
        tree: of the table's draws.
        row: of each node the first.
        number: of the node.
    """

    left: None = None
    p: None = None

    def __init__(
        self,
        lines: list[list[float]],
        weights: Tensor,
        tree: DraftTree,
        row: dict[int, int],
        number: int,
    ):
        self.mass_left, token, _, *self.numbers = lines[row[number]]
        self.token, self.weights, self.rejected = int(token), weights[row[number]], 0
        self.drafted = [tree.tokens[child] for child in tree.children[number]]

    def px(self, draw: int) -> float:
        """Return p of a draw."""
        return self.numbers[3 * draw]

    def qx(self, draw: int) -> float:
        """Return q of a draw."""
        return self.numbers[3 * draw + 1]

    def mass(self, c: float, w0: float = 1.0) -> float:
        """Return the residual's mass after one more rejection."""
        self.rejected += 1
        return self.numbers[3 * self.rejected - 1]

    def rest(self, c: float, w0: float = 1.0) -> None:
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
    nodes, row, drawn = [0], dict[int, int](), list[list[int]]()
    for at, node in enumerate(nodes):  # level by level
        below = [] if node in row else tree.children[node]
        row.setdefault(node, at)
        drawn.append([*range(len(nodes), len(nodes) + len(below))][:offered])
        nodes += below
    count, most = len(nodes), max(map(len, drawn))
    numbers = [
        [node, tree.tokens[node], uniform, *below, *[count] * (most - len(below))]
        for node, uniform, below in zip(nodes, rng.ahead(count), drawn, strict=True)
    ]
    sent = upload(torch.tensor(numbers, dtype=torch.float64), tree.device)
    whole = sent.long()
    table = VerificationTable(whole[:, 1], whole[:, 3:])
    p = tree.p_rows().index_select(0, whole[:, 0])
    # Numbers of q at leaves, which have none, do not matter.
    q = tree.q_rows([node if tree.children[node] else 0 for node in nodes]) if most else p
    rows = torch.arange(count, device=tree.device)
    for _, level in groupby(range(count), lambda at: bottom_up and tree.depth[nodes[at]]):
        first, *others = level
        here = slice(first, first + 1 + len(others))
        if draws := max(map(len, drawn[here])):
            table.reject(p[here], q[here], rows[here], draws, bottom_up)
    found, weights = table.finish(p, q, most, sent[:, 2])
    return partial(TableNode, found.tolist(), weights, tree, row)
