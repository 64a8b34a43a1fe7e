"""Windows of attention, through which a layer's rows do not see the full text.

With a window of 3 a row at position i sees the positions i - 2, i - 1 and i. With chunks of 3 it
sees those j up to i with j // 3 == i // 3. In a tree it sees of these the text and its ancestors: a
tree deeper than the window hides its own top. Positions count, not slots of the cache: siblings
share one.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


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


def masks(
    windows: dict[str, Window | None], mask: Tensor | None, rows: Tensor, columns: Tensor
) -> Tensor | dict[str, Tensor] | None:
    """The mask of each kind of layer, as transformers takes them; one, if all have the same."""
    if mask is None:
        return None
    cut = {
        kind: mask if window is None else window.cut(mask, rows, columns)
        for kind, window in windows.items()
    }
    return cut if len(cut) > 1 else next(iter(cut.values()))
