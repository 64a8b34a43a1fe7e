"""Tree masks: every row sees its ancestors and itself.

    parents = [-1, 0, 0, 1]         1 . . .
                                    1 1 . .
                                    1 . 1 .
                                    1 1 . 1

The tree attention of a pass, the rows of a super-tree and the path from a node to its root are all
read from this matrix.

Layers with sliding windows or chunks see less. With a window of 3 a row at position i sees the
positions i - 2, i - 1 and i. With chunks of 3 it sees those j up to i with j // 3 == i // 3. In a
tree it sees of these the text and its ancestors: a tree deeper than the window hides its own top.
Positions count, not slots of the cache: siblings share one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.readout import optional

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def ancestor_mask(parents: Tensor, depth: int | None = None) -> Tensor:
    """The matrix above, computed without a look at the numbers, so that a device is not waited for.

    Every round doubles how far up a row looks (pointer jumping).

    Args:
        parents: [..., N], long. The parent's row, below 0 for a root.
        depth: the largest number of rows above one; N - 1 where it is not known.

    Returns:
        [..., N, N], bool. Row n is True at n's ancestors and at n.
    """
    count = parents.shape[-1]
    rows = torch.arange(count, device=parents.device)
    up = torch.where(parents < 0, rows, parents)  # a root is its own parent
    sees = (rows[:, None] == rows).expand(*parents.shape, -1)
    for _ in range((count - 1 if depth is None else depth).bit_length()):
        sees = sees | sees.gather(-2, up[..., None].expand_as(sees))
        up = up.gather(-1, up)
    return sees


def grown_mask(sees: Tensor, parents: Tensor) -> Tensor:
    """Extend the ancestor mask `sees` [N, N] by a row for each of `parents` [n]: [N + n, N + n].

    The parents are among the N rows.
    """
    fresh = torch.cat(
        [
            sees.index_select(0, parents),
            torch.eye(len(parents), dtype=torch.bool, device=sees.device),
        ],
        1,
    )
    return torch.cat([F.pad(sees, (0, len(parents))), fresh])


class HostMask:
    """Additive mask of a tree that grows on the host: 0 where a row sees, else the dtype's minimum.

    It is written through NumPy, as integers of the same bits: one call of torch takes as long as
    ten of these. A row is written when it is asked for, since the rows of a path see all rows
    before them and need no mask.

    Attributes:
        depths: of each row, how many rows are above it.
    """

    def __init__(self, dtype: torch.dtype):
        self.depths: list[int] = []
        self._parents: list[int] = []
        self._written = 0  # rows
        self._mask = torch.empty(0, 0, dtype=dtype)
        self._reserve(64)

    def grow(self, parents: Sequence[int]) -> None:
        """Add a row for each of `parents`: the row that is its parent, or -1."""
        depths = self.depths
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self._parents += parents

    def clear(self) -> None:
        """Drop all rows."""
        self.depths.clear()
        self._parents.clear()
        self._written = 0

    def of(self, first: int) -> Tensor:
        """Return the mask [1, 1, n, rows] of the rows from number `first` on over all rows so far.

        It is overwritten after `clear`.
        """
        rows = len(self._parents)
        if rows > len(self._bits):
            self._reserve(2 * rows)
        bits = self._bits
        for row, parent in enumerate(self._parents[self._written :], self._written):
            bits[row, :row] = self._blocked
            bits[row, : parent + 1] = bits[parent, : parent + 1]
            bits[row, row] = 0
        self._written, width = rows, len(self._mask)
        return self._mask.as_strided((1, 1, rows - first, rows), (0, 0, width, 1), first * width)

    def _reserve(self, rows: int) -> None:
        old, dtype = self._mask, self._mask.dtype
        self._mask = torch.full((rows, rows), torch.finfo(dtype).min, dtype=dtype)
        self._bits = self._mask.view(
            {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        ).numpy()
        self._blocked = self._bits[0, 0].item()
        self._mask[: len(old), : len(old)] = old


def wide_mask(mask: Tensor, columns: int) -> Tensor:
    """Widen a mask [..., n, m] about the last m of `columns` slots to all of them.

    Every row sees the slots before.
    """
    return F.pad(mask, (columns - mask.shape[-1], 0)) if mask.shape[-1] < columns else mask


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
    windows: dict[str, Window | None], mask: Tensor, rows: Tensor, columns: Tensor, blocked: float
) -> Tensor | dict[str, Tensor]:
    """Return the mask of each kind of layer, by kind, or the only one.

    Args:
        windows: of the layers, by kind; None: such layers have no window.
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
