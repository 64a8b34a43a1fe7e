"""Layers whose rows see a part of the text alone: sliding windows and chunks.

With a window of 3 a row at position i sees the positions i - 2, i - 1 and i. With chunks of 3 it
sees those j up to i with j // 3 == i // 3. In a tree it sees of these the text and its ancestors: a
tree deeper than the window hides its own top. Positions count, not slots of the cache: siblings
share one.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL = "full_attention"
_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WINDOW_KEYS = tuple(_SIZES.values())
"""Where a configuration has the sizes."""


class Window(NamedTuple):
    """Of `size` tokens: the last ones, or where `chunked` those of the row's chunk."""

    size: int
    chunked: bool = False

    def hides(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether rows at these positions do not see `columns`, as far as the window goes; both
        broadcast.
        """
        if self.chunked:
            return rows // self.size != columns // self.size
        return rows - columns >= self.size


def layer_kinds(config: "PretrainedConfig") -> set[str]:
    """The kinds of attention of a model's layers, in transformers' words."""
    if kinds := getattr(config, "layer_types", None):
        return set(kinds)
    # Older families have one kind and no list. A key that the family does not know (in a file of
    # another one) does nothing.
    sliding = getattr(config, "sliding_window", None) and hasattr(type(config), "sliding_window")
    return {
        "sliding_attention" if sliding and getattr(config, "use_sliding_window", True) else FULL
    }


def windows(config: "PretrainedConfig") -> dict[str, Window | None]:
    """The window of each kind of layer, None where all is seen.

    Empty where that is so of all layers.
    """
    kinds = layer_kinds(config)
    sizes = {
        kind: getattr(config, _SIZES[kind], None) if kind in _SIZES else None
        for kind in sorted(kinds)
    }
    found = {
        kind: Window(size, kind == "chunked_attention") if size else None
        for kind, size in sizes.items()
    }
    return found if any(found.values()) else {}


def row_masks(
    windows: dict[str, Window | None], mask: Tensor, rows: Tensor, columns: Tensor, blocked: float
) -> Tensor | dict[str, Tensor]:
    """The mask of each kind of layer, by kind, or the only one.

    Args:
        mask: additive, what may be seen at all, [B or 1, 1, n, columns].
        rows: positions of the rows, [B, n].
        columns: positions of what the cache holds and of the rows, [B, columns].
        blocked: what a mask has where nothing is seen.
    """
    far = rows[:, None, :, None], columns[:, None, None]
    masks = {
        kind: mask if window is None else mask.masked_fill(window.hides(*far), blocked)
        for kind, window in windows.items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))
