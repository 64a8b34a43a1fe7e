"""Windows of layers that do not see the full text, and their masks.

With a window of 3 a row at position i sees the positions i - 2, i - 1 and i. With chunks of 3 it
sees those j up to i with j // 3 == i // 3. In a tree it sees of these the text and its ancestors: a
tree deeper than the window hides its own top. Positions count, not slots of the cache: siblings
share one.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.readout import optional

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL = "full_attention"
_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WINDOW_KEYS = tuple(_SIZES.values())
"""Where a configuration has the sizes."""


class Window(NamedTuple):
    """Window over `size` tokens: the last ones, or where `chunked` those of the row's chunk."""

    size: int
    chunked: bool = False

    def hides(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return True where the window hides `columns` from rows at these positions.

        Both broadcast.
        """
        if self.chunked:
            return rows // self.size != columns // self.size
        return rows - columns >= self.size

    def edges(self, tree: int, width: int) -> tuple[int, int]:
        """Find the slots that a tree of `width` rows sees, which begins at slot `tree`.

        Returns:
            The first slot that some row sees, and the first that all rows see.
        """
        return max(0, tree + 1 - self.size), max(0, min(tree, tree + width - self.size))

    def masked(
        self, mask: Tensor, rows: Tensor, columns: Tensor | None, parts: tuple[int, int, int]
    ) -> Tensor:
        """Extend the mask of a tree's rows by the window's edge, and hide what lies outside.

        Args:
            mask: additive, [B or 1, 1, n, width], over the tree's slots.
            rows: positions of the rows, [B, n].
            columns: positions of the slots, [B, slots].
            parts: the first slot that a row sees, the first that the mask leaves out, and the first
                of the tree.
        """
        (first, open, tree), width = parts, mask.shape[-1]
        if open > first:
            mask = F.pad(mask, (open - first, 0))
        if tree and self.edges(tree, width)[1] <= first and width <= self.size:
            return mask  # all rows see all that is left
        assert columns is not None
        return self.cut(mask, rows, torch.cat([columns[:, first:open], columns[:, tree:]], 1))

    def cut(self, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Hide in `mask` [.., n, m] the columns outside the windows of rows at these positions."""
        hidden = self.hides(rows[:, None, :, None], columns[:, None, None])
        return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def layer_kinds(config: "PretrainedConfig") -> set[str]:
    """The kinds of attention of a model's layers, in transformers' words."""
    if kinds := optional(config, "layer_types"):
        return set(kinds)
    # Older families have one kind and no list. A key that the family does not know (in a file of
    # another one) does nothing.
    sliding = optional(config, "sliding_window") and hasattr(type(config), "sliding_window")
    return {
        "sliding_attention" if sliding and optional(config, "use_sliding_window", True) else FULL
    }


def windows(config: "PretrainedConfig") -> dict[str, Window | None]:
    """The window of each kind of layer, None where all is seen.

    Empty where that is so of all layers.
    """
    kinds = layer_kinds(config)
    sizes = {
        kind: optional(config, _SIZES[kind]) if kind in _SIZES else None for kind in sorted(kinds)
    }
    windows_by_kind = {
        kind: Window(size, kind == "chunked_attention") if size else None
        for kind, size in sizes.items()
    }
    return windows_by_kind if any(windows_by_kind.values()) else {}


def row_masks(
    windows: dict[str, Window | None], mask: Tensor, rows: Tensor, columns: Tensor
) -> Tensor | dict[str, Tensor]:
    """Return the mask of each kind of layer, by kind, or the only one.

    Args:
        windows: of the layers, by kind; None: such layers have no window.
        mask: additive, what may be seen at all, [B or 1, 1, n, columns].
        rows: positions of the rows, [B, n].
        columns: positions of what the cache holds and of the rows, [B, columns].
    """
    masks = {
        kind: mask if window is None else window.cut(mask, rows, columns)
        for kind, window in windows.items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def wide_mask(mask: Tensor, columns: int) -> Tensor:
    """Widen a mask [..., n, m] about the last m of `columns` slots to all of them.

    Every row sees the slots before.
    """
    return F.pad(mask, (columns - mask.shape[-1], 0)) if mask.shape[-1] < columns else mask
