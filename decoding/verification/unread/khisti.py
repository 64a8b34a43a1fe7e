"""Khisti: the tournaments of all nodes of a level, stage by stage, with tokens in the order of their rank."""

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.unread import UnreadTree
from decoding.verification.ranking import advantage, place, rank_key
from decoding.verification.tournament import GRID
from decoding.verification.unread.solvers import kept_or_residual, walk


def khisti(tree: UnreadTree, rng: Rng) -> tuple[Tensor, Tensor]:
    """See `khisti.solve`, with its default tournament: no core, ranked by p / q, guarded."""
    return walk(tree, rng, solve)


def solve(p: Tensor, q: Tensor, draws: Tensor, counts: Tensor, rng: Rng) -> Tensor:
    winner, law = draws[:, :1], q
    if draws.shape[1] > 1:
        key = rank_key(advantage(p, q))
        order = key.argsort(dim=-1, stable=True)  # the worst first
        p_ranked, rival = (rows.gather(-1, order) for rows in (p, q))
        own = rival
        for stage in range(1, draws.shape[1]):
            change = stage_law(own, rival) - own
            theta = torch.where(counts > stage, best_mix(p_ranked, own, change), 0.0)
            own = own + theta.to(own)[:, None] * change
            other = draws[:, stage, None]
            better = place(key, winner) >= place(key, other)
            keeps = torch.where(better[:, 0], 1.0, 1 - theta)
            winner = torch.where(rng.bernoulli(keeps)[:, None], winner, other)
        law = torch.empty_like(own).scatter_(-1, order, own)
    return kept_or_residual(winner, p, law, counts, rng)


def stage_law(a: Tensor, b: Tensor) -> Tensor:
    """The law [m, V] of the better of Y ~ a and X ~ b, ranked from the worst."""
    worse_a, worse_b = (x.cumsum(-1, dtype=torch.float64).to(x) - x for x in (a, b))
    return a * (b + worse_b) + b * worse_a


def best_mix(p: Tensor, a: Tensor, change: Tensor) -> Tensor:
    """theta [m] on the grid that maximises sum min(p, a + theta change), which is concave in theta; float64."""

    def covered(step: Tensor) -> Tensor:
        return torch.minimum(p, a + (step / GRID).to(a)[:, None] * change).sum(-1, dtype=torch.float64)

    low = torch.zeros(len(p), dtype=torch.float64, device=p.device)
    high = torch.full_like(low, GRID)
    for _ in range(GRID.bit_length()):
        middle = torch.floor((low + high) / 2)
        rises = (covered(middle) < covered(middle + 1)) & (low < high)
        low, high = torch.where(rises, middle + 1, low), torch.where(rises, high, middle)
    return low / GRID
