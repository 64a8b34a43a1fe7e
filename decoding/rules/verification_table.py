"""Verification by one transfer: all numbers that a walk may look at, of every node at once.

On a GPU each number that the host reads is a wait. So the device computes p and q at the drafted
tokens, the mass of the residual after each rejection and a token drawn from the last residual, and
one transfer brings them. Rules walk unchanged, over nodes that look these up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
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


class Draws(NamedTuple):
    """Draws of the M inner nodes of a tree, up to K each; rows are its N nodes, inner ones first.

    Attributes:
        tokens: [M, K], in draft order.
        entered: [M, K], the row of each draw; N for a repeated or a missing one.
        counts: [M], number of draws of each node.
    """

    tokens: Tensor
    entered: Tensor
    counts: Tensor


def draws_of(tokens: Tensor, above: Tensor, inner: int, most: int) -> Draws:
    """Return the draws of a tree of N rows, of which each is a draw, whether some coincide or not.

    Args:
        tokens: [N], drawn at each row; the root's first.
        above: [N], the row that each was drawn below, the first of those that coincide.
        inner: M, the number of rows that may have draws.
        most: K, how many of them a rule looks at.
    """
    if not inner:
        tokens, above = tokens[:1], above[:1]
    count, rows = len(tokens), torch.arange(1, len(tokens), device=tokens.device)
    above, empty = above[1:], tokens.new_zeros(inner * most + 1)
    earlier = ((above[:, None] == above) & (rows < rows[:, None])).sum(1)
    place = torch.where(earlier < most, above * most + earlier, inner * most)
    counts = tokens.new_zeros(inner).index_add_(0, above, torch.ones_like(above))
    return Draws(
        empty.index_copy(0, place, tokens[1:])[:-1].view(inner, most),
        (empty + count).index_copy(0, place, rows)[:-1].view(inner, most),
        counts.clamp(max=most),
    )


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
    return table_of(tree, rng, offered, bottom_up)


class _Rows(NamedTuple):
    """Rows p, q [n, V] of nodes, in the form that `reject` takes.

    In its methods w0 is one weight for all nodes, or a weight per node [n].
    """

    p: Tensor
    q: Tensor

    def mass(self, c: Tensor, w0: Any) -> Tensor:
        """Return sum_t (w0 p(t) - c q(t))_+ [n], in float64."""
        return w0 * self.rest(c, w0).sum(-1, dtype=torch.float64)

    def rest(self, c: Tensor, w0: Any) -> Tensor:
        """Return weights [n, V] in proportion to (w0 p - c q)_+; p where both c and w0 are 0."""
        scale = c if isinstance(w0, float) else (c / w0.clamp(min=1e-300)).clamp(max=1e37)
        return self.p.addcmul(self.q, scale.to(self.p)[:, None], value=-1).clamp_(min=0)


def look_up(
    p: Tensor,
    q: Tensor,
    draws: Draws,
    levels: list[tuple[slice, int]],
    bottom_up: bool,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the numbers of a tree [3 M K + 2 N], and weights [N, V] that tokens are drawn from.

    Shapes depend on the arguments' shapes alone, and no number is read.

    Args:
        p: [N, V], the target's distributions.
        q: [M, V], the draft's at inner nodes.
        draws: of the inner nodes.
        levels: rows of inner nodes, parents before children, and the most draws of one of them.
        bottom_up: nodes are reached with a weight (Traversal), otherwise with 1.
        uniforms: [N], by which a token is drawn from each row of the weights.

    Returns:
        p and q at the draws, the residual's mass after each rejection, the last residual's, and the
        tokens; then the residuals, p where nothing is left.
    """
    count, inner = len(p), len(q)
    px, qx = (rows[:inner].gather(1, draws.tokens).double() for rows in (p, q))
    nothing = torch.zeros(inner, dtype=torch.float64, device=p.device)
    weights = nothing.new_ones(count + 1)
    masses, last = torch.zeros_like(px), [nothing[:0]]
    for at, most in levels:
        rows = _Rows(p[at], q[at])
        w0: Any = weights[at] if bottom_up else 1.0
        states = [Residual(nothing[at], nothing[at], nothing[at] + 1)]  # of none its mass is needed
        for _ in range(most):
            states.append(reject(rows, states[-1], w0))
        c, z, d = (torch.stack(each, 1) for each in zip(*states, strict=True))
        masses[at, :most] = z[:, 1:]
        last.append(c.gather(1, draws.counts[at, None])[:, 0])
        if bottom_up and at.stop < inner:  # nothing depends on the weight of a leaf
            before = Residual(c[:, :-1], None, d[:, :-1])
            entered = accept(px[at, :most], qx[at, :most], before, w0[:, None])
            weights.index_copy_(0, draws.entered[at, :most].flatten(), entered.flatten())
    weights = weights[:count]
    rest = _Rows(p[:inner], q).rest(torch.cat(last), weights[:inner] if bottom_up else 1.0)
    rest = torch.cat([rest, p[inner:]])
    left = rest.sum(-1, dtype=torch.float64)
    rest = torch.where((weights * left <= EMPTY)[:, None], p, rest)
    tokens = inverse_cdf(rest, uniforms[:, None]).double()
    return torch.cat([each.flatten() for each in (px, qx, masses, left, tokens)]), rest


@dataclass
class TableNode:
    """One node as rules see it (`residual.Node`), of a table; it is walked once.

    Attributes:
        drafted: its draws in draft order.
        token: what was drawn from its last residual.
        weights: [V], that it was drawn from.
        left_mass: their sum.
    """

    drafted: list[int]
    px_of: list[float]
    qx_of: list[float]
    masses: list[float]
    left_mass: float
    token: int
    weights: Tensor
    left: None = None
    p: None = None
    rejected: int = 0

    def px(self, draw: int) -> float:
        """Return p of a draw."""
        return self.px_of[draw]

    def qx(self, draw: int) -> float:
        """Return q of a draw."""
        return self.qx_of[draw]

    def mass(self, c: float, w0: float = 1.0) -> float:
        """Return the residual's mass after one more rejection."""
        self.rejected += 1
        return self.masses[self.rejected - 1]

    def rest(self, c: float, w0: float = 1.0) -> None:
        """Return nothing: a token was drawn already."""

    def draw(self, weights: Any, rng: Rng, w0: float = 1.0) -> int:
        """Return the token drawn from the last residual."""
        if not math.isfinite(self.left_mass):
            raise massless(self.left_mass)
        return rng.pick(self.token, self.weights)


def _levels(
    tree: DraftTree, inner: list[int], children: list[list[int]], bottom_up: bool
) -> list[tuple[slice, int]]:
    """Return the levels of `look_up`; all nodes are one where parents decide nothing."""
    levels, end = [], 0
    for _, level in groupby(inner, lambda node: bottom_up and tree.depth[node]):
        start, end = end, end + len(list(level))
        levels.append((slice(start, end), max(map(len, children[start:end]))))
    return levels


def table_of(
    tree: DraftTree, rng: Rng, offered: int | None, bottom_up: bool
) -> Callable[[int], TableNode]:
    """Return what gives the nodes of a tree by number; see `nodes_of`."""
    count = len(tree)
    inner = [node for node in range(count) if tree.children[node] and offered != 0]
    inner.sort(key=tree.depth.__getitem__)
    order = inner + [node for node in range(count) if node not in {*inner}]
    row = {node: at for at, node in enumerate(order)}
    children = [tree.children[node][:offered] for node in inner]
    most = max(map(len, children), default=0)

    def padded(entries: list[list[int]], missing: int) -> list[int]:
        return [each for row in entries for each in row + [missing] * (most - len(row))]

    tokens = padded([[tree.tokens[child] for child in row] for row in children], 0)
    entered = padded(
        [
            [count if child in drawn[:at] else row[child] for at, child in enumerate(drawn)]
            for drawn in children
        ],
        count,
    )
    numbers = [*order, *tokens, *entered, *map(len, children), *rng.ahead(count)]
    sent = upload(torch.tensor(numbers, dtype=torch.float64), tree.device)
    places, uniforms = sent[:-count].long(), sent[-count:]
    sizes = [count, len(tokens), len(tokens), len(inner)]
    rows, drawn, entries, counts = places.split(sizes)
    shape = len(inner), most
    draws = Draws(drawn.view(shape), entries.view(shape), counts)
    p = tree.p_rows().index_select(0, rows)
    q = tree.q_rows(inner) if inner else p[:0]
    levels = _levels(tree, inner, children, bottom_up)
    found, weights = look_up(p, q, draws, levels, bottom_up, uniforms)
    return nodes_in(found.tolist(), weights, tree, row, shape)


def nodes_in(
    values: list[float],
    weights: Tensor,
    tree: DraftTree,
    row: dict[int, int],
    shape: tuple[int, int],
) -> Callable[[int], TableNode]:
    """Return what gives the nodes of a tree by number.

    Args:
        values: `look_up`'s numbers.
        weights: [N, V].
        tree: with at most N nodes.
        row: of each node.
        shape: (M, K).
    """
    count, (inner, most) = len(weights), shape
    third = inner * most

    def node(number: int) -> TableNode:
        at = row[number]
        part = slice(at * most, at * most + most if at < inner else 0)
        px, qx, masses = (values[each * third : each * third + third][part] for each in range(3))
        drafted = [tree.tokens[child] for child in tree.children[number]]
        left, token = values[3 * third + at], int(values[3 * third + count + at])
        return TableNode(drafted, px, qx, masses, left, token, weights[at])

    return node
