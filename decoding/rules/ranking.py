"""Orders of the vocabulary: increasing by a key, ties by token id, so that every rank is held by
one token.

Which order a selection uses is free, as long as the selection and its law use the same. So scores
are compared by the upper 16 bits of their float32 only (a resolution of one percent): 16-bit keys
sort several times faster. `exact` compares all 32.
"""

import struct

import numpy as np
import torch
from torch import Tensor


def advantage(p: Tensor, q: Tensor) -> Tensor:
    """P / q in float32: the order in which GBV prefers tokens (Eq. 27, GBV paper).

    Infinite or NaN where q has no mass: such a token is never drafted and adds no mass, so its rank
    does not matter.
    """
    return (p / q).float()


def rank_key(score: Tensor, exact: bool = False) -> Tensor:
    """Keys [..., V] (int16, or int32 where `exact`) that rank tokens like `score` [..., V]
    (float32).
    """
    score = score + 0.0  # one zero only
    if exact:
        bits = score.view(torch.int32)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)
    upper = (score.view(torch.int32) >> 16).to(torch.int16)
    return upper ^ ((upper >> 15) & 0x7FFF)  # monotone for negative floats too


def order_of(key: Tensor) -> Tensor:
    """Token ids [..., V] in increasing order of `key` [..., V] (of any type), ties by id."""
    if key.device.type == "cpu":
        return torch.from_numpy(
            np.argsort(key.numpy(), axis=-1, kind="stable")
        )  # of int16: a radix sort
    return key.argsort(dim=-1, stable=True)


def order_by(score: Tensor, exact: bool = False) -> Tensor:
    """order_of(rank_key(score, exact)) of scores >= 0; where a score is NaN, its rank may be
    another.
    """
    if score.device.type != "cpu" or exact or score.shape[-1] > 1 << 16:
        return order_of(rank_key(score, exact))
    # Key and id in 32 bits: sorting numbers takes less time than sorting ids by their keys.
    packed = score.numpy().view(np.uint32) & 0xFFFF0000 | np.arange(
        score.shape[-1], dtype=np.uint32
    )
    packed.sort(axis=-1)
    return torch.from_numpy((packed & 0xFFFF).astype(np.int64))


def place(key: Tensor, token: Tensor) -> Tensor:
    """[m, n]: a number by which `token` [m, n] is ranked by `key` [m, V] of scores >= 0, ties by
    id.
    """
    return key.gather(-1, token).long() * key.shape[-1] + token


def bracket(score: Tensor) -> tuple[Tensor, Tensor]:
    """The interval [low, high) of scores (float32, not negative) that share the key of `score`."""
    low = score.view(torch.int32) >> 16 << 16
    return low.view(torch.float32), (low + (1 << 16)).view(torch.float32)


def bracket_of(score: float, exact: bool = False) -> tuple[float, float]:
    """The same for one number. exact: of that score alone."""
    (bits,) = struct.unpack("<I", struct.pack("<f", score))
    low, width = (bits, 1) if exact else (bits >> 16 << 16, 1 << 16)
    return struct.unpack("<ff", struct.pack("<II", low, low + width))


def mass_below(score: Tensor, weights: Tensor, token: int, exact: bool = False) -> float:
    """Sum of `weights` [V] over the tokens whose key (of scores >= 0) ranks strictly below `token`,
    without sorting.
    """
    if score.device.type == "cpu":
        ours, theirs = score.numpy(), weights.numpy()
        return mass_outside(
            ours, theirs, token, bracket_of(ours[token], exact), np.empty_like(theirs)
        )
    low, high = bracket_of(float(score[token]), exact)
    return float(
        weights[:token][score[:token] < high].sum() + weights[token:][score[token:] < low].sum()
    )


def mass_outside(
    score: np.ndarray,
    weights: np.ndarray,
    token: int,
    bracket: tuple[float, float],
    scratch: np.ndarray,
) -> float:
    """The same of arrays, given the bracket of `token`; scratch [V] is overwritten.

    NumPy compares several times faster than torch on a CPU.
    """
    low, high = bracket
    scratch[:token] = score[:token] < high  # of a tie, the smaller id ranks below
    scratch[token:] = score[token:] < low
    return float(weights @ scratch)
