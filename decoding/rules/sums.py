"""Reductions over rows of [V] numbers, a chunk at a time: what labels need of many rows at once."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_CACHED = 1 << 18  # numbers of a chunk that stay in a CPU's cache
_FULL = 1 << 26  # numbers of a chunk on a GPU


def positive_sums(p: Tensor, q: Tensor, rows: Tensor, w0: Tensor, c: Tensor) -> Tensor:
    """Return sum_t (w0 p(t) - c q(t))_+ for `rows` [M] of p, q [R, V]; float64 [M].

    w0, c: [M]. Only a chunk of rows is materialised.
    """
    sums, w0, c = torch.zeros_like(w0), w0.to(p), c.to(p)
    for at, row in row_chunks(p, rows):
        weights = (p[row] * w0[at, None]).addcmul_(q[row], c[at, None], value=-1)
        sums[at] = weights.clamp_(min=0).sum(-1).double()
    return sums


def hit_rates(
    p: Tensor, q: Tensor, draws: Tensor, target: Callable[[Tensor, Tensor, Any], Tensor]
) -> Tensor:
    """Return sum_t target(p, q)(t) (1 - (1 - q(t))^k) for rows of p, q [R, V] and k = 0..draws.

    1 - (1 - q)^k is summed as q sum_{j<k} (1 - q)^j, which cancels nothing.

    Args:
        p: [R, V].
        q: [R, V].
        draws: [R].
        target: (rows of p, rows of q, which rows these are) -> weights of the same shape.

    Returns:
        float64 [R, max(draws) + 1].
    """
    rates = torch.zeros(len(p), int(draws.max()) + 1, dtype=torch.float64, device=p.device)
    order = draws.argsort(descending=True, stable=True)  # alike ones stay neighbours
    rows = order[: int((draws > 0).sum())]
    counts = draws[rows].tolist()
    for at, row in row_chunks(p, rows):
        weights = target(p[row], q[row], row)
        rates[row, 1] = torch.linalg.vecdot(weights, q[row]).double()
        if counts[at.start] > 1:
            miss = 1 - q[row]
            weights = weights * q[row]
            for k in range(2, counts[at.start] + 1):
                rates[row, k] = rates[row, k - 1] + weights.mul_(miss).sum(-1).double()
    return rates


def row_chunks(p: Tensor, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield pairs (where in `rows` [M], rows of p)."""
    most = rows_at_once(p)
    for start in range(0, len(rows), most):
        yield (chunk := slice(start, start + most)), rows[chunk]


def rows_at_once(p: Tensor) -> int:
    """Return how many rows of [V] numbers a reduction should materialise at a time."""
    return max(1, (_CACHED if p.device.type == "cpu" else _FULL) // p.shape[-1])
