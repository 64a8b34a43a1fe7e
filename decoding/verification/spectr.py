"""SpecTr (K-SEQ): accept children one after another with min(1, p / (rho q)), with the smallest valid rho.

In the one-parameter family its state is c = rho: sum_t min(p, rho q) = 1 - Z(rho). Any rho in [rho*, k] is lossless and
any below is biased, so the solver returns the upper end of its bracket.
"""

import math

import numpy as np
import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level, none_before, ratio
from decoding.verification.naive import solve as naive
from decoding.verification.residual import positive_sums
from decoding.verification.topdown import at_first, by_draws, walk


def thresholds(p: Tensor, q: Tensor, rows: Tensor, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rho, sum_t min(p, rho q)), both [M], for `rows` [M] of p, q [R, V] with k [M] children each."""
    listed, scratch = rows.tolist(), torch.empty_like(p[0])
    distinct = sorted(set(listed))
    one = torch.ones(len(distinct), dtype=torch.float64, device=p.device)
    sums = positive_sums(p, q, torch.tensor(distinct, device=rows.device), one, one).tolist()
    at_one = {row: 1 - z for row, z in zip(distinct, sums, strict=True)}
    # One after the other: a row of a large vocabulary stays in the cache until its rho is found.
    found = [
        threshold(p[row], q[row], children, at_one[row], scratch) if children > 1 else (1.0, at_one[row])
        for row, children in zip(listed, k.tolist(), strict=True)
    ]
    return tuple(np.array(column) for column in zip(*found, strict=True)) if found else (np.empty(0), np.empty(0))


def threshold(p: Tensor, q: Tensor, k: float, at_one: float, scratch: Tensor) -> tuple[float, float]:
    """The same of one node, p, q [V]; at_one = sum_t min(p, q); scratch [V] is overwritten.

    With b(x) = sum_t min(p, x q), rho* solves p_acc = b (Algorithm 3, NDE paper), that is x = g(b(x)) where
    g(b) = b / (1 - (1 - b)^(1/k)). b grows and g falls, so g(b(1)) is an upper bound. A secant on g(b(x)) - x inside the
    bracket takes four reductions instead of thirty bisections.
    """
    tolerance = 1e-13 if p.dtype == torch.float64 else 1e-5

    def g(b: float) -> float:
        b = min(max(b, 1e-300), 1 - 2**-53)
        return b / -math.expm1(math.log1p(-b) / k)

    if acceptance(1.0, at_one, k) <= at_one:
        return 1.0, at_one
    low, last, ahead = 1.0, 1.0, g(at_one) - 1
    high = min((1 + ahead) * (1 + tolerance), k)
    x, best = 1 + (high - 1) / (0.7 + 0.3 * k), None  # where it lies for typical rows
    for turn in range(100):
        b = 1 - float(torch.sub(p, q, alpha=x, out=scratch).clamp_(min=0).sum())
        value, y = acceptance(x, b, k) - b, g(b) - x
        if value <= 0:
            high, best = x, (x, b)
        else:
            low, high = x, high if x < high else k
        narrow = high - low <= tolerance * high
        if best and best[0] == high and (narrow or -tolerance <= value <= 0):
            break
        slope = (x - last) / (y - ahead) if y != ahead else math.inf
        guess = min((x - y * slope) * (1 + tolerance), high)
        last, ahead = x, y
        x = high if narrow else guess if low < guess and turn < 12 else (low + high) / 2
    if best is None:  # p and q hardly meet, and rounding hides where the two sides cross: k is always valid
        return k, 1 - float(torch.sub(p, q, alpha=k, out=scratch).clamp_(min=0).sum())
    return best


def acceptance(rho: float, covered: float, k: float) -> float:
    """p_acc = 1 - (1 - beta)^k with beta = covered / rho, to full relative precision."""
    beta = covered / rho
    return -math.expm1(k * math.log1p(-beta)) if beta < 1 else 1.0


def solve(p: Tensor, q: Tensor, drafted: list[int], rng: Rng) -> int:
    """Algorithm 3, NDE paper, with the residual for the rho at hand: (p - p_acc / covered * min(p, rho q))_+."""
    if (k := len(drafted)) == 1:
        return naive(p, q, drafted, rng)
    rho, covered = (float(x[0]) for x in thresholds(p[None], q[None], torch.zeros(1, dtype=torch.long), np.array([float(k)])))
    for token in drafted:
        px, qx = float(p[token]), rho * float(q[token])
        if rng.bernoulli(1.0 if px >= qx else px / qx):
            return token
    if covered <= 0:  # p and q do not meet: what is left is p itself
        return rng.categorical(p)
    taken = torch.minimum(p, rho * q).mul_(min(acceptance(rho, covered, k) / covered, 1.0))
    residual = (p - taken).clamp_(min=0)
    return rng.categorical(residual if float(residual.sum(dtype=torch.float64)) > 1e-12 else p)


def spectr(tree: DraftTree, rng: Rng) -> Verdict:
    """Top-down walk with the K-SEQ solver."""
    return walk(tree, rng, solve)


class SpecTrBranching:
    """B(f, X, t) = sum_j a_j 1{X_j = t} prod_{l<j} (1 - a_l); at rho* the residual never lands on a drafted token."""

    def __init__(self, p: Tensor, q: Tensor, draws: Tensor):
        most = int(draws.max())
        rows, k = (torch.arange(1, most + 1, device=p.device) <= draws[:, None]).nonzero().unbind(-1)
        k = k + 1
        found = thresholds(p, q, rows, k.double().cpu().numpy())
        rho, covered = (torch.from_numpy(x).to(p.device) for x in found)
        self.rho = torch.ones(len(p), most + 1, dtype=torch.float64, device=p.device)
        self.alpha = torch.zeros_like(self.rho)
        self.rho[rows, k] = rho
        self.alpha[rows, k] = 1 - (1 - (covered / rho).clamp(max=1)) ** k

    def contributions(self, level: Level) -> Tensor:
        accept = ratio(level.px, by_draws(self.rho, level, level.draws) * level.qx)
        return accept * none_before(accept, level.siblings) * level.member

    def last(self, level: Level) -> Tensor:
        """alpha = p_acc(rho) (Algorithm 8, NDE paper, whose second term is nought at rho*)."""
        return at_first(self.alpha, level)
