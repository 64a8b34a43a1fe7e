"""Native forward passes of Gemma 2 and 3."""

import torch
from torch import Tensor

from nde_talf.decoding.forward.native import NativeForward
from nde_talf.decoding.registry import family

BLOCK = 512
"""Rows of scores in memory at once: of a prompt, all are gigabytes."""


@family("gemma2")
@family("gemma3_text")
class GemmaForward(NativeForward):
    """Norms multiply by 1 + w."""

    added = True


def capped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Attention [B, heads, n, D] with scores capped as Gemma 2 does."""
    if query.shape[2] > BLOCK and mask is not None:
        blocks = zip(query.split(BLOCK, 2), mask.split(BLOCK, 2), strict=True)
        parts = [capped(rows, keys, values, seen, scale, cap) for rows, seen in blocks]
        return torch.cat(parts, 2)
    scores = (query @ keys.transpose(-1, -2)).mul_(scale / cap).tanh_().mul_(cap)
    scores = scores if mask is None else scores.add_(mask)
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
