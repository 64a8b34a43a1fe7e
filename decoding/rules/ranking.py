"""Orders of the vocabulary: increasing by a key, ties by token id, so that ranks are unique.

Which order a selection uses is free, as long as the selection and its law use the same. So scores
are compared by the upper 16 bits of their float32 only (a resolution of one percent): 16-bit keys
sort several times faster. `exact` compares all 32.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.rules.residual import total


def advantage(p: Tensor, q: Tensor) -> Tensor:
    """Return the bits of p / q in float32, int32: GBV prefers larger ones (Eq. 27, GBV paper).

    Numbers of at least 0 have the order of their bits. A token without q-mass is never drafted and
    adds no mass, so its rank does not matter.
    """
    return (p / q).float().view(torch.int32)


def rank_key(bits: Tensor, exact: bool = False) -> Tensor:
    """Return keys [..., V] (int16, or int32 where `exact`) that rank tokens by `advantage`."""
    return bits if exact else (bits >> 16).to(torch.int16)


def order_of(key: Tensor) -> Tensor:
    """Return token ids [..., V] in increasing order of `key` [..., V] (of any type), ties by id."""
    if key.device.type == "cpu":  # of int16: a radix sort
        return torch.from_numpy(np.argsort(key.numpy(), axis=-1, kind="stable"))
    return key.argsort(dim=-1, stable=True)


def mass_below(bits: Tensor, weights: Tensor, token: int, exact: bool) -> float:
    """Return the sum of `weights` [V] over tokens ranked strictly below `token`, without sorting.

    bits: [V], of `advantage`. Of a tie, the smaller id ranks below.
    """
    width = 1 if exact else 1 << 16
    low = int(bits[token]) // width * width
    high = low + width  # bits from low on, below high, tie
    chosen = torch.empty_like(weights)
    arrays: Any = (bits.numpy(), chosen.numpy()) if bits.is_cpu else (bits, chosen)
    ranks, into = arrays
    into[:token] = ranks[:token] < high  # numpy compares several times faster than torch
    into[token:] = ranks[token:] < low
    # A dot product would add one after the other, and lose what is small.
    return total(chosen.mul_(weights))
