"""Orders of the vocabulary: increasing by a score, ties by token id, so that every rank is held by one token."""

import numpy as np
import torch
from torch import Tensor


def order_of(score: Tensor) -> Tensor:
    """Token ids [..., V] in increasing order of `score` [..., V], ties by id.

    On a CPU float32 scores are sorted together with their ids as 64-bit integers, several times faster than an argsort.
    """
    if score.device.type != "cpu" or score.dtype != torch.float32:
        return score.argsort(dim=-1, stable=True)
    bits = (score + 0.0).contiguous().numpy().view(np.int32)  # + 0.0: one zero only
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)  # monotone for negative floats too
    keys <<= 32
    keys |= np.arange(score.shape[-1])
    keys.sort(-1)
    keys &= 0xFFFFFFFF
    return torch.from_numpy(keys)


def mass_below(score: Tensor, weights: Tensor, token: int) -> float:
    """Sum of `weights` [V] over the tokens that rank strictly below `token`, without sorting."""
    at = score[token]
    mass = float((weights * (score < at)).sum(dtype=torch.float64))
    ties = (score[:token] == at).nonzero()[:, 0]
    return mass + float(weights[ties].sum(dtype=torch.float64)) if len(ties) else mass


def advantage(p: Tensor, q: Tensor) -> Tensor:
    """p / q, infinite where q has no mass: the order in which GBV prefers tokens (Eq. 27, paper 001)."""
    return torch.where(q > 0, p / q, torch.inf)
