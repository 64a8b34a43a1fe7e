"""Orders of the vocabulary: increasing by a key, ties by token id, so that ranks are unique.

Which order a selection uses is free, as long as the selection and its law use the same. So scores
are compared by the upper 16 bits of their float32 only (a resolution of one percent): 16-bit keys
sort several times faster. `exact` compares all 32.
"""

import struct

import numpy as np
import torch
from torch import Tensor


def advantage(p: Tensor, q: Tensor) -> Tensor:
    """Return p / q in float32: the order in which GBV prefers tokens (Eq. 27, GBV paper).

    Infinite or NaN where q has no mass: such a token is never drafted and adds no mass, so its rank
    does not matter.
    """
    return (p / q).float()


def rank_key(score: Tensor, exact: bool = False) -> Tensor:
    """Return keys [..., V] (int16, or int32 where `exact`) that rank tokens like float32 scores."""
    bits = (score + 0.0).view(torch.int32)  # one zero only
    if not exact:
        bits = (bits >> 16).to(torch.int16)
    kind = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (kind.bits - 1)) & kind.max)  # monotone for negative floats too


def order_of(key: Tensor) -> Tensor:
    """Return token ids [..., V] in increasing order of `key` [..., V] (of any type), ties by id."""
    if key.device.type == "cpu":  # of int16: a radix sort
        return torch.from_numpy(np.argsort(key.numpy(), axis=-1, kind="stable"))
    return key.argsort(dim=-1, stable=True)


def bracket(score: float, exact: bool) -> tuple[float, float]:
    """Return the interval [low, high) of scores >= 0 that share the key of `score`."""
    (bits,) = struct.unpack("<I", struct.pack("<f", score))
    low, width = (bits, 1) if exact else (bits >> 16 << 16, 1 << 16)
    return struct.unpack("<ff", struct.pack("<II", low, low + width))


def mass_below(score: Tensor, weights: Tensor, token: int, exact: bool) -> float:
    """Return the sum of `weights` [V] over tokens ranked strictly below `token`, without sorting.

    Scores are >= 0. Of a tie, the smaller id ranks below.
    """
    low, high = bracket(float(score[token]), exact)
    if score.device.type != "cpu":
        below = weights[:token][score[:token] < high].sum()
        return float(below + weights[token:][score[token:] < low].sum())
    scores, masses = score.numpy(), weights.numpy()  # which compares several times faster
    chosen = np.empty_like(masses)
    chosen[:token] = scores[:token] < high
    chosen[token:] = scores[token:] < low
    return float(masses @ chosen)
