"""SpecInfer: children are tried one after another in draft order, each against the current residual.

Round i accepts x with min(1, p_i(x) / q(x)), p_{i+1} = norm((p_i - q)_+). Lossless for i.i.d. children in any order that
does not look at token values; draft order keeps branching probabilities O(k). With children drawn without replacement
the draft's mass shrinks too (DySpec paper, Appendix A.3; Sequoia).
"""

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level, none_before, ratio
from decoding.verification.residual import Residual, positive_sums
from decoding.verification.topdown import at_first, by_draws, walk


def solve(p: Tensor, q: Tensor, drafted: list[int], rng: Rng, masses: list[float] | None = None) -> int:
    """Algorithm 4, NDE paper; masses: of children drawn without replacement, see `DraftTree.masses`."""
    residual = Residual(p, q)
    for token, left in zip(drafted, masses or [1.0] * len(drafted), strict=True):
        if rng.bernoulli(residual.weight(token, left)):
            return token
        residual.reject(left)
    return rng.categorical(residual.target())


def specinfer(tree: DraftTree, rng: Rng) -> Verdict:
    """Top-down walk with SpecInfer's OTLP solver."""
    return walk(tree, rng, solve)


def without_replacement(tree: DraftTree, rng: Rng) -> Verdict:
    """The same for trees whose children are distinct draws, as DySpec and Sequoia make them."""
    return walk(tree, rng, solve, distinct=True)


class SpecInferBranching:
    """B(f, X, t) = sum_i A_i a_i(X_i) 1{X_i = t}, A_i the probability that all before were rejected."""

    def __init__(self, p: Tensor, q: Tensor, draws: Tensor):
        self.c = torch.zeros(len(p), int(draws.max()) + 1, dtype=torch.float64, device=p.device)
        self.z = torch.ones_like(self.c)
        for k in range(1, self.c.shape[1]):
            rows = (draws >= k).nonzero()[:, 0]
            self.c[rows, k] = self.c[rows, k - 1] + self.z[rows, k - 1]
            self.z[rows, k] = positive_sums(p, q, rows, torch.ones_like(self.c[rows, k]), self.c[rows, k])

    def contributions(self, level: Level) -> Tensor:
        earlier = level.earlier
        c, z = by_draws(self.c, level, earlier), by_draws(self.z, level, earlier)
        accept = ratio(level.px - c * level.qx, z * level.qx)
        return accept * none_before(accept, level.siblings) * level.member

    def last(self, level: Level) -> Tensor:
        """alpha = 1 - Z_k = sum min(p, c_k q) (Algorithm 9, NDE paper)."""
        return at_first(1 - self.z, level)
