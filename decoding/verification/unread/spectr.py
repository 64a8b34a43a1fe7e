"""SpecTr: rho by bisections of a fixed number for all nodes of a level, upper ends kept: a little above rho* is lossless."""

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.unread import UnreadTree
from decoding.verification.bundles import ratio
from decoding.verification.unread.solvers import drawn, or_else, walk

HALVINGS = {torch.float64: 48, torch.float32: 20}  # of [1, K]: as close as the host's rule comes


def spectr(tree: UnreadTree, rng: Rng) -> tuple[Tensor, Tensor]:
    """See `spectr.solve`."""
    return walk(tree, rng, solve)


def solve(p: Tensor, q: Tensor, draws: Tensor, counts: Tensor, rng: Rng) -> Tensor:
    k = counts.clamp(min=1).double()
    rho, covered = threshold(p, q, k, draws.shape[1])
    px, qx = (rows.gather(-1, draws).double() for rows in (p, q))
    own = torch.arange(draws.shape[1], device=draws.device) < counts[:, None]
    hits = rng.bernoulli((ratio(px, rho[:, None] * qx) * own).flatten()).view_as(own)
    accepted = draws.gather(-1, hits.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
    share = torch.where(covered > 0, (acceptance(rho, covered, k) / covered).clamp(max=1), 0.0)
    taken = torch.minimum(p, rho.to(p)[:, None] * q).mul_(share.to(p)[:, None])
    residual = drawn(or_else((p - taken).clamp_(min=0), p, counts), rng)
    return torch.where(hits.any(-1), accepted, residual)


def threshold(p: Tensor, q: Tensor, k: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(rho, sum_t min(p, rho q)), both [m], at nodes with k [m] draws, `most` at most."""

    def covered(rho: Tensor) -> Tensor:
        return (1 - (p - rho.to(p)[:, None] * q).clamp_(min=0).sum(-1, dtype=torch.float64)).clamp(min=0)

    low, high = torch.ones_like(k), k
    for _ in range(HALVINGS[p.dtype] if most > 1 else 0):
        middle = (low + high) / 2
        found = covered(middle)
        valid = acceptance(middle, found, k) <= found
        low, high = torch.where(valid, low, middle), torch.where(valid, middle, high)
    return high, covered(high)


def acceptance(rho: Tensor, covered: Tensor, k: Tensor) -> Tensor:
    """p_acc [m]; see `spectr.acceptance`."""
    return -torch.expm1(k * torch.log1p(-(covered / rho).clamp(max=1)))
