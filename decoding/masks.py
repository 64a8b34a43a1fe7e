"""Which rows of a tree see which: every row sees its ancestors and itself.

    parents = [-1, 0, 0, 1]         1 . . .
                                    1 1 . .
                                    1 . 1 .
                                    1 1 . 1

The tree attention of a pass, the rows of a super-tree and the path from a node to its root are all read from this matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def ancestor_mask(parents: Tensor, depth: int | None = None) -> Tensor:
    """The matrix above, computed without a look at the numbers, so that a device is not waited for.

    Every round doubles how far up a row looks (pointer jumping).

    Args:
        parents: [N], long. The parent's row, -1 for a root.
        depth: the largest number of rows above one; N - 1 where it is not known.

    Returns:
        [N, N], bool. Row n is True at n's ancestors and at n.
    """
    rows = torch.arange(len(parents), device=parents.device)
    up = torch.where(parents < 0, rows, parents)  # a root is its own parent
    sees = rows[:, None] == rows
    for _ in range((len(parents) - 1 if depth is None else depth).bit_length()):
        sees = sees | sees.index_select(0, up)
        up = up.index_select(0, up)
    return sees


def grown_mask(sees: Tensor, parents: Tensor) -> Tensor:
    """The ancestor mask `sees` [N, N] with one row more for each of `parents` [n], which are among the N: [N + n, N + n]."""
    fresh = torch.cat([sees.index_select(0, parents), torch.eye(len(parents), dtype=torch.bool, device=sees.device)], 1)
    return torch.cat([F.pad(sees, (0, len(parents))), fresh])


class HostMask:
    """The matrix of a tree that grows on the host, as an additive mask: 0 where a row sees, the dtype's minimum elsewhere.

    It is written through NumPy, as integers of the same bits: one call of torch takes as long as ten of these.

    Attributes:
        depths: of each row, how many rows are above it.
    """

    def __init__(self, dtype: torch.dtype):
        self.depths: list[int] = []
        self._mask = torch.empty(0, 0, dtype=dtype)
        self._reserve(64)

    def grow(self, parents: Sequence[int]) -> None:
        """Add a row for each of `parents`: the row that is its parent, or -1."""
        depths, first, end = self.depths, len(self.depths), len(self.depths) + len(parents)
        if end > len(self._bits):
            self._reserve(2 * end)
        bits = self._bits
        for row, parent in enumerate(parents, first):
            bits[row, :row] = self._blocked
            bits[row, : parent + 1] = bits[parent, : parent + 1]
            bits[row, row] = 0
            depths.append(depths[parent] + 1 if parent >= 0 else 0)

    def of(self, first: int) -> Tensor:
        """What the rows from number `first` on see of all rows so far, [1, 1, n, rows]. It is overwritten once the rows are
        dropped by emptying `depths`."""
        rows, width = len(self.depths), len(self._mask)
        return self._mask.as_strided((1, 1, rows - first, rows), (0, 0, width, 1), first * width)

    def _reserve(self, rows: int) -> None:
        old, dtype = self._mask, self._mask.dtype
        self._mask = torch.full((rows, rows), torch.finfo(dtype).min, dtype=dtype)
        self._bits = self._mask.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).numpy()
        self._blocked = self._bits[0, 0].item()
        self._mask[: len(old), : len(old)] = old


def wide_mask(mask: Tensor, columns: int) -> Tensor:
    """A mask [..., n, m] about the last m of `columns` slots as one about all of them: every row sees the slots before."""
    return F.pad(mask, (columns - mask.shape[-1], 0)) if mask.shape[-1] < columns else mask
