"""SpecTr (K-SEQ): accept children one after another with min(1, p / (rho q)), with the smallest valid rho.

In the one-parameter family its state is c = rho: sum_t min(p, rho q) = 1 - Z(rho). Any rho in [rho*, k] is lossless and
any below is biased, so the solver returns the upper end of its bracket.
"""

import numpy as np
import torch
from torch import Tensor

from decoding.sampling import Coins
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level, none_before, ratio
from decoding.verification.naive import solve as naive
from decoding.verification.residual import positive_sums
from decoding.verification.topdown import at_first, by_draws, walk


def thresholds(p: Tensor, q: Tensor, rows: Tensor, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rho, sum_t min(p, rho q)), both [M], for `rows` [M] of p, q [R, V] with k [M] children each.

    rho is the upper end of a bracket of the root of p_acc(rho) - rho beta(rho), which decreases on [1, k] (Algorithm 3, paper
    000), found by false position (Illinois), all rows at once: half a dozen reductions instead of thirty bisections.
    """
    tolerance = 1e-13 if p.dtype == torch.float64 else 1e-5

    def mass(at: np.ndarray, x: np.ndarray) -> np.ndarray:
        c = torch.from_numpy(x).to(p.device)
        return 1 - positive_sums(p, q, rows[torch.from_numpy(at).to(rows.device)], torch.ones_like(c), c).cpu().numpy()

    def gap(x: np.ndarray, covered: np.ndarray, draws: np.ndarray) -> np.ndarray:
        return 1 - (1 - np.clip(covered / x, 0, 1)) ** draws - covered

    k = k.astype(np.float64)
    everyone = np.arange(len(k))
    low, high = np.ones_like(k), k.copy()
    _, first, same = np.unique(rows.cpu().numpy(), return_index=True, return_inverse=True)
    at_low = mass(first, low[first])[same]
    below = gap(low, at_low, k)
    todo = everyone[(k > 1) & (below > 0)]
    high[(k == 1) | (below <= 0)] = 1.0
    covered = at_low.copy()
    covered[todo] = mass(todo, high[todo])
    above = gap(high, covered, k)
    slack, side = -above, np.zeros_like(k)
    for _ in range(100):
        todo = todo[(slack[todo] > tolerance) & (high[todo] - low[todo] > tolerance * high[todo])]
        if not len(todo):
            break
        x = (low[todo] * above[todo] - high[todo] * below[todo]) / (above[todo] - below[todo])
        x = np.clip(x, low[todo], high[todo])
        found = mass(todo, x)
        value = gap(x, found, k[todo])
        up, down = todo[value <= 0], todo[value > 0]
        high[up], covered[up], above[up], slack[up] = x[value <= 0], found[value <= 0], value[value <= 0], -value[value <= 0]
        low[down], below[down] = x[value > 0], value[value > 0]
        below[up[side[up] > 0]] /= 2  # the same end moved twice: halve the other's weight
        above[down[side[down] < 0]] /= 2
        side[up], side[down] = 1, -1
    return high, covered


def acceptance(rho: float, covered: float, k: float) -> float:
    """p_acc = 1 - (1 - beta)^k with beta = covered / rho."""
    return 1 - (1 - min(covered / rho, 1.0)) ** k


def solve(p: Tensor, q: Tensor, drafted: list[int], coins: Coins) -> int:
    """Algorithm 3, paper 000, with the residual for the rho at hand: (p - p_acc / covered * min(p, rho q))_+."""
    if (k := len(drafted)) == 1:
        return naive(p, q, drafted, coins)
    rho, covered = (float(x[0]) for x in thresholds(p[None], q[None], torch.zeros(1, dtype=torch.long), np.array([k])))
    for token in drafted:
        px, qx = float(p[token]), rho * float(q[token])
        if coins.accept(1.0 if px >= qx else px / qx):
            return token
    if covered <= 0:  # p and q do not meet: what is left is p itself
        return coins.draw(p)
    taken = torch.minimum(p, rho * q).mul_(min(acceptance(rho, covered, k) / covered, 1.0))
    residual = (p - taken).clamp_(min=0)
    return coins.draw(residual if float(residual.sum(dtype=torch.float64)) > 1e-12 else p)


def spectr(tree: DraftTree, coins: Coins) -> Verdict:
    """Top-down walk with the K-SEQ solver."""
    return walk(tree, coins, solve)


class SpecTrBranching:
    """B(f, X, t) = sum_j a_j 1{X_j = t} prod_{l<j} (1 - a_l); at rho* the residual never lands on a drafted token."""

    def __init__(self, p: Tensor, q: Tensor, draws: Tensor):
        most = int(draws.max())
        rows, k = (torch.arange(1, most + 1, device=p.device) <= draws[:, None]).nonzero().unbind(-1)
        k = k + 1
        found = thresholds(p, q, rows, k.cpu().numpy())
        rho, covered = (torch.from_numpy(x).to(p.device) for x in found)
        self.rho = torch.ones(len(p), most + 1, dtype=torch.float64, device=p.device)
        self.alpha = torch.zeros_like(self.rho)
        self.rho[rows, k] = rho
        self.alpha[rows, k] = 1 - (1 - (covered / rho).clamp(max=1)) ** k

    def contributions(self, level: Level) -> Tensor:
        accept = ratio(level.px, by_draws(self.rho, level, level.draws) * level.qx)
        return accept * none_before(accept, level.siblings) * level.member

    def last(self, level: Level) -> Tensor:
        """alpha = p_acc(rho) (Algorithm 8, paper 000, whose second term is nought at rho*)."""
        return at_first(self.alpha, level)
