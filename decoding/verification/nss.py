"""NSS, naive speculative sampling on a tree: draw from p and follow the draw if it was drafted.

It does not look at how children came about, so it is lossless on every tree, chosen ones included.
"""

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level
from decoding.verification.residual import row_chunks
from decoding.verification.topdown import at_first, walk


def solve(p: Tensor, q: Tensor | None, drafted: list[int], rng: Rng) -> int:
    """t ~ p (Algorithm 1, NDE paper)."""
    return rng.categorical(p)


def nss(tree: DraftTree, rng: Rng) -> Verdict:
    """Top-down walk with the NSS solver."""
    return walk(tree, rng, solve)


class NSSBranching:
    """B(f, X, t) = p(t)."""

    def __init__(self, p: Tensor, q: Tensor, draws: Tensor):
        self.alpha = hit_rates(p, q, draws, lambda p, q: p)

    def contributions(self, level: Level) -> Tensor:
        return level.px * level.fresh * level.member

    def last(self, level: Level) -> Tensor:
        """alpha = sum_t p (1 - (1 - q)^k) (Algorithm 6, NDE paper)."""
        return at_first(self.alpha, level)


def hit_rates(p: Tensor, q: Tensor, draws: Tensor, target) -> Tensor:
    """sum_t target(p, q)(t) (1 - (1 - q(t))^k) for rows of p, q [R, V] and k = 0..draws; float64 [R, max(draws) + 1].

    target: (rows of p, rows of q) -> weights of the same shape. 1 - (1 - q)^k = q sum_{j<k} (1 - q)^j, which cancels nothing.
    """
    rates = torch.zeros(len(p), int(draws.max()) + 1, dtype=torch.float64, device=p.device)
    rows = draws.argsort(descending=True, stable=True)[: int((draws > 0).sum())]  # alike ones stay neighbours
    counts = draws[rows].tolist()
    for at, row in row_chunks(p, rows):
        weights = target(p[row], q[row])
        rates[row, 1] = torch.linalg.vecdot(weights, q[row]).double()
        if counts[at.start] > 1:
            miss = 1 - q[row]
            weights = weights * q[row]
            for k in range(2, counts[at.start] + 1):
                rates[row, k] = rates[row, k - 1] + weights.mul_(miss).sum(-1).double()
    return rates
