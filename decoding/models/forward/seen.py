"""Slots that the rows of a pass see, as attention takes them."""

from typing import NamedTuple

from torch import Tensor

ALIGNED = 8
"""Alignment that CUDA's kernels want of a mask's lines and, for flash attention, of heads."""


class Seen(NamedTuple):
    """Slots that the n rows of a pass see in layers of one kind.

    For example, after a text of 5,000 tokens a tree of 5 rows: text = 5000, and the mask has 5
    columns. After a text of 100 tokens text = 0, and the mask has 105. In a window of 64 tokens the
    tree's root, at position 100, sees the slots from 37 on: first = 37, and the mask has 68.

    Attributes:
        first: the first slot that some row sees.
        text: so many slots are attended to without a mask, on their own.
        mask: additive, of the slots after both, [B or 1, 1, groups n, slots]; the rows are repeated
            for each of the `groups` of query heads that share a head of keys, unless they are
            `alone`. None: all of them are seen, or if `alone`, by each row those up to itself.
        alone: nothing is cached, as in a prompt, whose mask is larger than its keys.
    """

    first: int = 0
    text: int = 0
    mask: Tensor | None = None
    alone: bool = False
