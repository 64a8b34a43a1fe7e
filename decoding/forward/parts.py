"""Attention in two parts, to the text without a mask and to a tree under one, and their merge.

For a row with scores s over two sets of slots A and B:

    softmax over A and B = w softmax(A) + (1 - w) softmax(B),    w = sigmoid(lse(A) - lse(B)),
    lse(A) = log(sum exp(s in A))

This is the merge of FlashAttention (Dao et al.) between blocks.
"""

from functools import cache

import torch
from torch import Tensor

from nde_talf.decoding.forward.attention import ALIGNED, Seen

_FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention.default
_EFFICIENT_ON_CUDA = torch.ops.aten._scaled_dot_product_efficient_attention.default


@cache
def has_flash(device: torch.device, dtype: torch.dtype, size: int = 64) -> bool:
    """Return True if flash attention runs there, for heads of this size.

    NVIDIA's GPUs before Ampere (T4, V100) have none, and float32 has none on any.
    """
    if device.type != "cuda":
        return device.type == "cpu"
    like = torch.empty(1, 1, 1, size, dtype=dtype, device=device)
    asked = torch.backends.cuda.SDPAParams(like, like, like, None, 0.0, False, False)
    return torch.backends.cuda.can_use_flash_attention(asked)


def ungrouped(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for every head of a group, unless flash attention takes groups.

    CUDA's plain kernel, which takes them too, would hold all scores.
    """
    if has_flash(query.device, query.dtype, query.shape[-1]):
        return keys, values
    groups = query.shape[1] // keys.shape[1]
    return keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)


def merged(query: Tensor, keys: Tensor, values: Tensor, seen: Seen, scale: float) -> Tensor:
    """Merge attention without a mask and attention under one: [B, heads, n, D].

    All rows see the slots of the first kind.
    """
    near = [states[:, :, seen.tree :] for states in (keys, values)]
    if seen.open > seen.first:
        edge = slice(seen.first, seen.open)
        near = [
            torch.cat([states[:, :, edge], nearby], 2)
            for states, nearby in zip((keys, values), near, strict=True)
        ]
    far = slice(seen.open, seen.tree)
    text, of_text = weighed(query, keys[:, :, far], values[:, :, far], None, scale)
    tree, of_tree = weighed(query, near[0], near[1], seen.mask, scale)
    return torch.lerp(tree, text, torch.sigmoid(of_text - of_tree)[..., None].to(tree.dtype))


def weighed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention with as many heads of queries as of keys.

    Returns:
        Attention [B, heads, n, D], and the log-sum-exp [B, heads, n] of the scores.
    """
    if query.device.type == "cpu":
        return _FLASH_ON_CPU(query, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    if query.device.type != "cuda" or query.shape[-1] % ALIGNED:
        return weighed_in_steps(query, keys, values, mask, scale)
    if mask is None and has_flash(query.device, query.dtype, query.shape[-1]):
        attended, total, *_ = _FLASH_ON_CUDA(query, keys, values, 0.0, False, False, scale=scale)
        return attended, total
    mask = None if mask is None else mask.expand(*query.shape[:3], -1)
    attended, total, *_ = _EFFICIENT_ON_CUDA(
        query, keys, values, mask, True, 0.0, False, scale=scale
    )
    return attended, total[..., : query.shape[2]]  # a multiple of 32


def weighed_in_steps(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`weighed` for any device, type and mask. The scores are in memory, so it is for few slots."""
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    scores = scores if mask is None else scores + mask
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().to(values.dtype) @ values, total
