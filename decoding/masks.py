"""Tree masks: every row sees its ancestors and itself.

    parents = [-1, 0, 0, 1]         1 . . .
                                    1 1 . .
                                    1 . 1 .
                                    1 1 . 1

The tree attention of a pass, the rows of a super-tree and the path from a node to its root are all
read from this matrix.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


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
