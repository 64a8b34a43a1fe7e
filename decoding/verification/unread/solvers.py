"""OTLP solvers for all nodes of a level at once: every node gets a token, which is followed while it was drafted."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from decoding.ranked import RankedTree
from decoding.sampling import Rng
from decoding.unread import UnreadTree
from decoding.verification.bundles import ratio
from decoding.verification.unread.follow import checked, follow

# (p [m, V], q [m, V], draws [m, n], counts [m], rng) -> tokens [m]: of every node's draws the first `counts` are its own, in
# draft order.
Solve = Callable[[Tensor, Tensor, Tensor, Tensor, Rng], Tensor]


def nss(tree: UnreadTree | RankedTree, rng: Rng) -> tuple[Tensor, Tensor]:
    """See `nss.solve`."""
    return following(tree, drawn(tree.p, rng))


def greedy(tree: UnreadTree | RankedTree, rng: Rng) -> tuple[Tensor, Tensor]:
    """See `greedy.greedy`: no token where p is not one-hot."""
    top, token = tree.p.max(-1)
    return following(tree, torch.where(top >= 1 - 1e-6, token, -1))


def naivetree(tree: UnreadTree, rng: Rng) -> tuple[Tensor, Tensor]:
    """See `naive.solve`."""
    return walk(tree, rng, first_or_residual)


def first_or_residual(p: Tensor, q: Tensor, draws: Tensor, counts: Tensor, rng: Rng) -> Tensor:
    return kept_or_residual(draws[:, :1], p, q, counts, rng)


def kept_or_residual(token: Tensor, p: Tensor, law: Tensor, counts: Tensor, rng: Rng) -> Tensor:
    """`token` [m, 1] of `law` [m, V], or a token of (p - law)_+: speculative sampling. Of p where there are no draws."""
    px, lx = (rows.gather(-1, token)[:, 0].double() for rows in (p, law))
    accepted = rng.bernoulli(ratio(px, lx) * (counts > 0))
    return torch.where(accepted, token[:, 0], drawn(or_else((p - law).clamp_(min=0), p, counts), rng))


def walk(tree: UnreadTree, rng: Rng, solve: Solve) -> tuple[Tensor, Tensor]:
    """See `topdown.walk`."""
    tokens = []
    for level, below in pairwise(tree.levels):
        p, q = tree.p[level.rows], torch.stack(tree.q[level.rows])
        tokens.append(solve(p, q, *below.draws(level), rng))
    leaves = tree.p[tree.levels[-1].rows]
    return following(tree, torch.cat([*tokens, drawn(leaves, rng)]))


def following(tree: UnreadTree | RankedTree, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Given the token of every node [N]."""
    end = follow(tree, tree.drafted == tokens.index_select(0, tree.above.clamp(min=0)))
    return end, tokens.index_select(0, end)


def drawn(rows: Tensor, rng: Rng) -> Tensor:
    """A token [m] of each of `rows` [m, V]; see `checked`."""
    return checked(rng.categorical(rows), rows)


def or_else(residual: Tensor, p: Tensor, counts: Tensor) -> Tensor:
    """`residual` [m, V], but p where there are no draws, or rounding left no mass."""
    empty = (counts == 0) | (residual.sum(-1, dtype=torch.float64) <= 1e-12)
    return torch.where(empty[:, None], p, residual)
