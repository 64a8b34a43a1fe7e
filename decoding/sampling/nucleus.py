"""Top-k, top-p and min-p: the improbable tokens of a distribution are dropped."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def nucleus(probs: Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """Drop improbable tokens of `probs` by top-k, then top-p, then min-p, and divide by the sum.

    Tokens are ranked by probability; of equal ones the lower id ranks first. The first n are kept,
    the least of three numbers. For example of 0.4, 0.1, 0.3, 0.2 with top_p = 0.6 the tokens 0 and
    2 are kept, as 4/7 and 3/7.

    - top-k: at most top_k tokens.
    - top-p: the smallest n whose sum reaches top_p times the sum of the tokens that top-k leaves (1
      where it is off). Sums are in float64, in the order of the ranks. A GPU adds in another order:
      there a sum within 1e-12 of the limit may count as either side of it.
    - min-p: tokens with at least min_p times the largest probability, a product in the type of
      `probs`.

    On a CPU each row is solved on its own. One comparison leaves out most tokens, and the values of
    the others are sorted, without their ids. Ids are looked at only where the last
    token kept has the same probability as one that is not. On a device all rows are sorted, ids
    too; the host does not wait.

    Args:
        probs: [..., V], each row a distribution.
        top_p: in (0, 1]; 1 is off.
        top_k: 0 is off.
        min_p: in [0, 1]; 0 is off.

    Returns:
        [..., V]. A row that holds NaN is NaN everywhere.
    """
    top_k = top_k if top_k < probs.shape[-1] else 0
    if not probs.is_cpu:
        return nucleus_sorted(probs, top_p, top_k, min_p)
    rows, out = (
        probs.reshape(-1, probs.shape[-1]).numpy(),
        torch.empty(probs.shape, dtype=probs.dtype),
    )
    for row, into in zip(rows, out.view(rows.shape).numpy(), strict=True):
        if not (top := row.max()) > 0:
            into[:] = np.nan
            continue
        lowest, count, mass = _last_kept(row, top_p, top_k, top * row.dtype.type(min_p))
        np.multiply(row, at_least := row >= lowest, out=into)
        if (surplus := np.count_nonzero(at_least) - count) > 0:
            into[np.flatnonzero(row == lowest)[-surplus:]] = 0
        into /= row.dtype.type(mass)
    return out


def _last_kept(
    row: np.ndarray, top_p: float, top_k: int, floor: np.floating
) -> tuple[Any, int, float]:
    """Return the cutoff of a row [V], how many tokens pass it, and their mass.

    floor: the smallest probability that min-p keeps.
    """
    if top_k:
        ranked = torch.from_numpy(row).topk(top_k).values
        masses = ranked.cumsum(0, dtype=torch.float64).numpy()
        limit = top_p * masses[-1]
    else:
        limit = top_p
        # Tokens below the first number have less than 1 - top_p together, but for the rounding of
        # the row's sum.
        for least in ((1 - top_p) / len(row), 0.0):
            some = np.compress(row >= max(floor, least), row)
            some.sort()
            ranked = torch.from_numpy(some[::-1].copy())
            masses = ranked.cumsum(0, dtype=torch.float64).numpy()
            if floor >= least or (len(masses) and masses[-1] >= limit):
                break
    count = int(np.count_nonzero(ranked.numpy() >= floor))
    if top_p < 1:
        count = min(count, int(masses.searchsorted(limit)) + 1)
    return ranked.numpy()[count - 1], count, masses[count - 1]


def nucleus_sorted(probs: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Cut rows by sorting all tokens of each, without a look at the numbers."""
    top, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = top >= min_p * top[..., :1]
    if top_k:
        kept[..., top_k:] = False
    if top_p < 1:
        masses = top[..., : top_k or None].cumsum(-1, dtype=torch.float64)
        limit = top_p * masses[..., -1:] if top_k else top_p
        kept[..., 1 : masses.shape[-1]] &= masses[..., :-1] < limit
    top = top * kept
    top = top / top.sum(-1, keepdim=True, dtype=torch.float64).to(top.dtype)
    return torch.zeros_like(probs).scatter_(-1, ids, top)
