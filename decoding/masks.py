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


def blocked_lines(parents: Sequence[int], before: Sequence[bytes] = ()) -> list[bytes]:
    """The same for the host, where a few rows are cheaper as bytes than as tensors.

    Args:
        parents: of each new row, the row that is its parent, or -1.
        before: the lines of the rows that are there already.

    Returns:
        A line for each new row, as long as there are rows up to it: 1 where the row does not see, 0 where it does.
    """
    lines = list(before)
    for row, parent in enumerate(parents, len(lines)):
        above = lines[parent] if parent >= 0 else b""
        lines.append(above + b"\1" * (row - len(above)) + b"\0")
    return lines[len(before) :]


def blocked_mask(lines: Sequence[bytes]) -> Tensor:
    """Lines as a tensor [n, width], bool: True where a row does not see. The last line is the longest."""
    width = len(lines[-1])
    joined = bytearray(b"").join(line.ljust(width, b"\1") for line in lines)
    return torch.frombuffer(joined, dtype=torch.bool).view(len(lines), width)


def wide_mask(mask: Tensor, columns: int) -> Tensor:
    """A mask [..., n, m] about the last m of `columns` slots as one about all of them: every row sees the slots before."""
    return F.pad(mask, (columns - mask.shape[-1], 0)) if mask.shape[-1] < columns else mask
