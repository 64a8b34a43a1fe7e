"""SpecInfer and traversal: the weights of a residual rule do not depend on what is accepted, so they are there for all nodes at
once, and so is every decision; which of them count is a matter of following them down."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from decoding.sampling import LEAST_MASS, Rng
from decoding.unread import UnreadTree
from decoding.verification.bundles import ratio
from decoding.verification.unread.follow import checked, follow


@dataclass
class Weights:
    """Of all N nodes, float64: own: what a draw is accepted with when its turn comes; w0: what the node arrives with; c: of the
    residual behind all its children (w0 p - c q)_+; keep: the probability that it is kept once they were rejected."""

    own: Tensor
    w0: Tensor
    c: Tensor
    keep: Tensor


def specinfer(tree: UnreadTree, rng: Rng, distinct: bool = False) -> tuple[Tensor, Tensor]:
    """The first accepted draw of every node is followed; see `specinfer.solve`."""
    weights = residual_weights(tree, carried=False, distinct=distinct)
    end = follow(tree, rng.bernoulli(weights.own))
    return end, correction(tree, weights, end, rng)


def traversal(tree: UnreadTree, rng: Rng, distinct: bool = False) -> tuple[Tensor, Tensor]:
    """Every node is kept or not behind its children: the first node kept, in the order of `traversal.traversal`, is found by
    going down to the first child with a kept node below it."""
    weights = residual_weights(tree, carried=True, distinct=distinct)
    kept = rng.bernoulli(weights.keep)
    below = [kept[level.rows] for level in tree.levels]
    for at in range(len(tree.levels) - 1, 0, -1):
        level, upper = tree.levels[at], tree.levels[at - 1]
        below[at] = below[at].index_select(0, level.first - level.start)
        below[at - 1] = below[at - 1] | (level.under(upper) & below[at]).any(1)
    end = follow(tree, torch.cat(below))
    return end, correction(tree, weights, end, rng)


def residual_weights(tree: UnreadTree, carried: bool, distinct: bool = False) -> Weights:
    """See `residual.Residual`, for all nodes, a level at a time. carried: a node arrives with its own weight (traversal), else
    with 1. distinct: children were drawn without replacement; one that comes again has weight 0."""
    parts = list(_levels(tree, carried, distinct))
    own = torch.cat([torch.ones_like(parts[0][0]), *(part[-1] for part in parts[:-1])])
    return Weights(own, *(torch.cat(column) for column in list(zip(*parts, strict=True))[:3]))


def _levels(tree: UnreadTree, carried: bool, distinct: bool) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """w0, c, keep [n] of every level, and own of the next."""
    w0 = tree.p.new_ones(1, dtype=torch.float64)
    for level, below in pairwise([*tree.levels, None]):
        c, d = torch.zeros_like(w0), torch.ones_like(w0)
        if below is None:
            yield w0, c, w0, w0[:0]
            return
        p, q = tree.p[level.rows], torch.stack(tree.q[level.rows])
        states, masses = [(c, d, w0)], below.masses(level) if distinct else None
        for turn in range(below.most):
            c = c + (d if masses is None else torch.where(masses[:, turn] >= LEAST_MASS, d / masses[:, turn], 0.0))
            z = (w0.to(p)[:, None] * p).sub_(c.to(q)[:, None] * q).clamp_(min=0).sum(-1, dtype=torch.float64)
            d = z + 1 - w0
            states.append((c, d, torch.where(w0 < 1, z / d, w0)))
        by_c, by_d, by_keep = (torch.stack(column, 1) for column in zip(*states, strict=True))
        at, earlier, draws = below.above - level.start, below.earlier(), below.under(level).sum(1, keepdim=True)
        px, qx = (rows[at, below.token].double() for rows in (p, q))
        law = qx if masses is None else qx / masses[at, earlier].clamp(min=LEAST_MASS)
        own = ratio(w0[at] * px - by_c[at, earlier] * qx, by_d[at, earlier] * law)
        if masses is not None:  # where nothing was left, a draw came again
            own = torch.where(masses[at, earlier] >= LEAST_MASS, own, 0.0)
        yield w0, by_c.gather(1, draws)[:, 0], by_keep.gather(1, draws)[:, 0], own
        w0 = own if carried else torch.ones_like(own)


def correction(tree: UnreadTree, weights: Weights, end: Tensor, rng: Rng) -> Tensor:
    """A token [1] from the residual behind all children of `end`; from p where rounding (p = q) left no mass."""
    p = tree.p.index_select(0, end)
    inner = [q for q in tree.q if q is not None]
    residual = p
    if inner:  # of a leaf, which has no q, c is 0
        q = torch.stack(inner).index_select(0, end.clamp(max=len(inner) - 1))
        w0, c = (x.index_select(0, end).to(p)[:, None] for x in (weights.w0, weights.c))
        residual = (w0 * p - c * q).clamp(min=0)
        residual = torch.where(residual.sum(-1, keepdim=True, dtype=torch.float64) <= 1e-12, p, residual)
    return checked(rng.categorical(residual), residual)
