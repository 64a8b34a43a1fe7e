"""NaiveTree: speculative sampling on the first child; the residual may still land on another one.

On a single path this is the original speculative sampling (Naive).
"""

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level, ratio
from decoding.verification.nss import hit_rates
from decoding.verification.residual import Residual, positive_sums
from decoding.verification.topdown import at_first, walk


def solve(p: Tensor, q: Tensor, drafted: list[int], rng: Rng) -> int:
    """Accept X_1 with min(1, p / q), otherwise t ~ norm((p - q)_+) (Algorithm 2, NDE paper)."""
    residual = Residual(p, q)
    if rng.bernoulli(residual.weight(drafted[0])):
        return drafted[0]
    residual.reject()
    return rng.categorical(residual.target())


def naivetree(tree: DraftTree, rng: Rng) -> Verdict:
    """Top-down walk with the Naive OTLP solver."""
    return walk(tree, rng, solve)


class NaiveBranching:
    """B(f, X, t) = a 1{t = X_1} + (1 - a) p_res(t), a = min(1, p / q) at X_1."""

    def __init__(self, p: Tensor, q: Tensor, draws: Tensor):
        self.z = p.new_zeros(len(p), dtype=torch.float64)
        rows = draws.nonzero()[:, 0]
        one = torch.ones(len(rows), dtype=torch.float64, device=p.device)
        self.z[rows] = positive_sums(p, q, rows, one, one)
        hits = hit_rates(p, q, torch.where(draws > 1, draws - 1, 0), lambda p, q: (p - q).clamp_(min=0))
        self.alpha = torch.cat([torch.zeros_like(one[:1]).expand(len(p), 1), (1 - self.z)[:, None] + hits], -1)

    def contributions(self, level: Level) -> Tensor:
        """A residual hit counts at the first draw of its token."""
        accept = ratio(level.px, level.qx).expand(level.siblings.shape[:3])
        first = level.siblings.to(torch.uint8).argmax(-1)  # the node's first draw; meaningless where this is it
        residual = (level.px - level.qx).clamp(min=0) / self.z[level.node][:, None].clamp(min=1e-30)
        later = (1 - accept.gather(-1, first)) * residual.clamp(max=1) * level.fresh
        return torch.where(level.earlier == 0, accept, later) * level.member

    def last(self, level: Level) -> Tensor:
        """alpha = sum min(p, q) + sum (p - q)_+ (1 - (1 - q)^(k - 1)) (Algorithm 7, NDE paper)."""
        return at_first(self.alpha, level)
