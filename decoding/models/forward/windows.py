"""Windows of attention, through which a layer's rows do not see the full text.

With a window of 3 a row at position i sees the positions i - 2, i - 1 and i. With chunks of 3 it
sees those j up to i with j // 3 == i // 3. In a tree it sees of these the text and its ancestors: a
tree deeper than the window hides its own top. Positions count, not slots of the cache: siblings
share one.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.device import blocked


class Window(NamedTuple):
    """Window over `size` tokens: the last ones, or where `chunked` the row's chunk."""

    size: int
    chunked: bool = False

    def masked(self, mask: Tensor, rows: Tensor, columns: Tensor, more: int) -> Tensor:
        """Extend the mask of a tree's rows by `more` slots before them; see `cut`."""
        mask = F.pad(mask, (more, 0)) if more else mask
        first = columns.shape[1] - mask.shape[-1]
        if first + more and mask.shape[-1] <= self.size:
            return mask  # all rows see all that is left
        return self.cut(mask, rows, columns[:, first:])

    def cut(self, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Hide in `mask` [B or 1, 1, n, m] what is outside of the rows' windows.

        Args:
            mask: additive.
            rows: positions of the rows, [B, n].
            columns: positions of the slots, [B, m].
        """
        rows, columns = rows[:, None, :, None], columns[:, None, None]
        if self.chunked:
            hidden = rows // self.size != columns // self.size
        else:
            hidden = columns <= rows - self.size
        return mask.masked_fill(hidden, blocked(mask.dtype))


def masks(
    windows: dict[str, Window | None], mask: Tensor | None, rows: Tensor, columns: Tensor
) -> Tensor | dict[str, Tensor] | None:
    """Return the mask of each kind of layer for transformers; one, if all have the same."""
    if mask is None:
        return None
    cut = {
        kind: mask if window is None else window.cut(mask, rows, columns)
        for kind, window in windows.items()
    }
    return cut if len(cut) > 1 else next(iter(cut.values()))
