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

    With b(x) = sum_t min(p, x q), rho* solves p_acc = b (Algorithm 3, paper 000), that is x = g(b(x)) where
    g(b) = b / (1 - (1 - b)^(1/k)). b grows and g falls, so g(b(1)) is an upper bound. A secant on g(b(x)) - x inside the
    bracket, all rows at once, takes four reductions instead of thirty bisections.
    """
    tolerance = 1e-13 if p.dtype == torch.float64 else 1e-5
    k = k.astype(np.float64)

    def mass(at: np.ndarray, x: np.ndarray) -> np.ndarray:
        c = torch.from_numpy(x).to(p.device)
        return 1 - positive_sums(p, q, rows[torch.from_numpy(at).to(rows.device)], torch.ones_like(c), c).cpu().numpy()

    def gap(x: np.ndarray, b: np.ndarray) -> np.ndarray:
        return 1 - (1 - np.clip(b / x, 0, 1)) ** k - b

    def g(b: np.ndarray) -> np.ndarray:
        b = np.clip(b, 1e-300, 1)
        return b / -np.expm1(np.log1p(-b) / k)

    rho = np.ones_like(k)
    _, first, same = np.unique(rows.cpu().numpy(), return_index=True, return_inverse=True)
    covered = mass(first, rho[first])[same]
    at = np.flatnonzero((k > 1) & (gap(rho, covered) > 0))
    low, k = rho[at], k[at]
    with np.errstate(divide="ignore", invalid="ignore"):
        last, ahead = low, g(covered[at]) - low
        high = np.minimum((low + ahead) * (1 + tolerance), k)
        x = low + (high - low) / (0.7 + 0.3 * k)  # where it lies for typical rows
        for turn in range(100):
            if not len(at):
                break
            found = mass(at, x)
            value, y = gap(x, found), g(found) - x
            up = value <= 0
            rho[at[up]], covered[at[up]] = x[up], found[up]
            low, high = np.where(up, low, x), np.where(up, x, np.where(x < high, high, k))
            narrow = high - low <= tolerance * high
            guess = np.minimum((x - y * (x - last) / (y - ahead)) * (1 + tolerance), high)
            following = np.where((guess > low) & (turn < 12), guess, (low + high) / 2)
            following[narrow] = high[narrow]
            todo = (rho[at] != high) | ((value < -tolerance) | ~up) & ~narrow
            last, ahead, x = x[todo], y[todo], following[todo]
            at, low, high, k = at[todo], low[todo], high[todo], k[todo]
    return rho, covered


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
