"""Attention in two parts, to the text without a mask and to a tree under one, and their merge.

For a row with scores s over two sets of slots A and B:

    softmax over A and B = w softmax(A) + (1 - w) softmax(B),    w = sigmoid(lse(A) - lse(B)),
    lse(A) = log(sum exp(s in A))

This is the merge of FlashAttention (Dao et al.) between blocks.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.models.forward.seen import ALIGNED, Seen

_FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention.default
_EFFICIENT_ON_CUDA = torch.ops.aten._scaled_dot_product_efficient_attention.default


@cache
def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the device has flash attention for this type.

    NVIDIA's GPUs before Ampere (T4, V100) have none, and float32 has none on any.
    """
    if device.type != "cuda":
        return device.type == "cpu"
    like = torch.empty(1, 1, 1, 64, dtype=dtype, device=device)
    asked = torch.backends.cuda.SDPAParams(like, like, like, None, 0.0, False, False)
    return torch.backends.cuda.can_use_flash_attention(asked)


def merged(query: Tensor, keys: Tensor, values: Tensor, seen: Seen, scale: float) -> Tensor:
    """Merge attention without a mask and attention under one: [B, heads, n, D].

    All rows see the slots of the first kind.
    """
    at = seen.text
    text, of_text = weighed(query, keys[:, :, :at], values[:, :, :at], None, scale)
    tree, of_tree = weighed(query, keys[:, :, at:], values[:, :, at:], seen.mask, scale)
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
    size = query.shape[-1]
    if missing := -size % ALIGNED:  # as torch's own entry does
        query, keys, values = (F.pad(states, (0, missing)) for states in (query, keys, values))
    if mask is None:
        attended, total, *_ = _FLASH_ON_CUDA(query, keys, values, 0.0, False, False, scale=scale)
        return attended[..., :size], total
    mask = mask.expand(*query.shape[:3], -1)
    attended, total, *_ = _EFFICIENT_ON_CUDA(
        query, keys, values, mask, True, 0.0, False, scale=scale
    )
    return attended[..., :size], total[..., : query.shape[2]]  # a multiple of 32
