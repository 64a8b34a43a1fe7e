"""Attention of a tree's rows to the text and to one another, without a mask as wide as the text.

All rows of a tree see the whole text. So they attend to it without a mask, and to the few rows of
the tree under a small one (`split_attention`). In a layer with a sliding window each row sees the
last slots before itself: there the slots that no row sees are left out, and one mask is about all
others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.device import blocked
from nde_talf.decoding.models.forward.seen import ALIGNED, Seen
from nde_talf.decoding.models.forward.split_attention import has_flash, merged
from nde_talf.decoding.models.forward.windows import Window

OPEN_FROM = {"cpu": 4096}
"""Cached length above which text and tree are attended separately, by kind of device.

`OPEN` is for other devices, timed on an H100.
"""
OPEN = 8192
LONE = 64
"""Duplicate a lone bfloat16 row on a CPU beyond this length.

torch takes longer for one row than for two: after 2,000 tokens a pass of 16 layers of 8 heads takes
87 ms, and 52 with the row doubled.
"""


def seen_in(
    window: Window | None,
    mask: Tensor | None,
    rows: Tensor,
    columns: Any,
    cached: int,
    dtype: torch.dtype,
    groups: int = 1,
    capped: bool = False,
) -> Seen:
    """Find what the rows of a pass see.

    Args:
        window: the layers' own; None: they have none.
        mask: additive, [B or 1, 1, n, m], about the last m slots. All rows see what their window
            lets them see of the slots before these, which hold a text: slot i its token i. None: a
            row sees the cached slots and the rows up to itself.
        rows: positions of the rows, [B, n].
        columns: positions of the slots, [B, slots]; only looked at where there is a window.
        cached: number of slots before the rows of this pass.
        dtype: of the states.
        groups: query heads for each head of keys.
        capped: whether the layers cap their scores, which takes one mask over all slots.
    """
    count = rows.shape[1]
    if mask is None:
        if not cached and not capped and (window is None or count <= window.size):
            return Seen(alone=True)
        mask = _causal(count, dtype, rows.device)
    width = count if mask is None else mask.shape[-1]
    tree = cached + count - width  # the slot of the tree's first row
    first = 0 if window is None else max(0, tree + 1 - window.size)
    if mask is None:
        return Seen(first)
    text, alone = 0, not cached
    if window is not None:
        mask = window.masked(mask, rows, columns, tree - first)
    elif capped or not _in_two_parts(tree, rows.device, dtype):
        mask = F.pad(mask, (tree, 0))
    else:
        text = tree
    return Seen(first, text, _repeated(mask, 1 if alone else groups), alone)


def _causal(count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the mask of rows that see those up to themselves; one row needs none."""
    shape = 1, 1, count, count
    return (
        torch.full(shape, blocked(dtype), dtype=dtype, device=device).triu_(1)
        if count > 1
        else None
    )


def _repeated(mask: Tensor, groups: int) -> Tensor:
    """Repeat the rows of a mask for every group of heads, in lines that CUDA's kernels take."""
    mask = mask.repeat(1, 1, groups, 1) if groups > 1 else mask
    slots = mask.shape[-1]
    if mask.is_cuda and slots % ALIGNED:  # else every layer would copy it
        mask = F.pad(mask, (0, -slots % ALIGNED))[..., :slots]
    return mask


def attend(
    query: Tensor, keys: Tensor, values: Tensor, seen: Seen, scale: float, cap: float | None = None
) -> Tensor:
    """Compute attention of n rows in one layer.

    Args:
        query: [B, heads, n, D].
        keys: of all slots, [B, shared, slots, D]; query heads in groups of heads / shared have one
            head of them.
        values: of all slots, shaped like `keys`.
        seen: the slots that the rows see.
        scale: of the scores, query · key.
        cap: c of scores c tanh(scale query · key / c); None: they are not capped.

    Returns:
        [B n, heads D].
    """
    batch, heads, count, size = query.shape
    shared = keys.shape[1]
    if seen.alone and heads != shared:
        # of CUDA's kernels that take groups one holds all scores
        keys, values = (states.repeat_interleave(heads // shared, 1) for states in (keys, values))
        shared = heads
    # The rows of a group go as rows of one head, so that its keys and values are read once and
    # never copied.
    rows = query if heads == shared else query.reshape(batch, shared, -1, size)
    if lone := _is_lone(rows, keys, seen):
        rows = rows.repeat(1, 1, 2, 1)
    if seen.text:
        attended = merged(rows, keys, values, seen, scale)
    else:
        if seen.first:
            keys, values = keys[:, :, seen.first :], values[:, :, seen.first :]
        if cap is None:
            causal = seen.alone and seen.mask is None
            attended = F.scaled_dot_product_attention(
                rows, keys, values, seen.mask, is_causal=causal, scale=scale
            )
        else:
            attended = capped(rows, keys, values, seen.mask, scale, cap)
    if lone:
        attended = attended[:, :, :1]
    if heads != shared:
        attended = attended.reshape(query.shape)
    return attended.transpose(1, 2).reshape(batch * count, heads * size)


def _is_lone(rows: Tensor, keys: Tensor, seen: Seen) -> bool:
    """Return True if the only row is to be doubled, see `LONE`."""
    slow = rows.is_cpu and rows.dtype == torch.bfloat16 and seen.mask is None
    return slow and rows.shape[2] == 1 and keys.shape[2] >= LONE


def _in_two_parts(text: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a text of so many slots is attended to on its own, without a mask."""
    if text < OPEN_FROM.get(device.type, OPEN):
        return False
    return has_flash(device, dtype)


BLOCK = 512
"""Rows of scores in memory at once: of a prompt, all are gigabytes."""


def capped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Compute attention [B, heads, n, D] with scores capped as Gemma 2 does."""
    if query.shape[2] > BLOCK and mask is not None:
        blocks = zip(query.split(BLOCK, 2), mask.split(BLOCK, 2), strict=True)
        parts = [capped(rows, keys, values, seen, scale, cap) for rows, seen in blocks]
        return torch.cat(parts, 2)
    scores = (query @ keys.transpose(-1, -2)).mul_(scale / cap).tanh_().mul_(cap)
    scores = scores if mask is None else scores.add_(mask)
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
