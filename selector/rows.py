"""Columns of traced roots that are larger than memory, in temporary files read by row.

At the NDE paper's scale, 448,000 training roots, hidden states in half precision take 6 to 15 GB
and labels 10 GB. A training step needs 128 rows of them.
"""

import math
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.filesize import decimal as size
from torch import Tensor

from nde_talf.decoding.common.errors import UserError

if TYPE_CHECKING:
    from nde_talf.data.traces.store import TraceStore

Batches = Callable[[], Iterator[np.ndarray]]


class Column:
    """Rows [R, ...] of one column, in a file.

    It is written when a row is first read, and deleted with this object.

    Args:
        batches: yields arrays [r, ...] whose rows are those of the column, in order.
        path: of the file.
        dtype: float16 or float32, of the file. Rows are read as float32.
        shape: [R, ...].
    """

    def __init__(self, batches: Batches, path: Path, dtype: torch.dtype, shape: tuple[int, ...]):
        self.batches, self.path, self.dtype, self.shape = batches, path, dtype, shape

    def mean(self) -> Tensor:
        """[R, ...]: the means over the second dimension. It writes no file."""
        return torch.cat([torch.from_numpy(batch.copy()).mean(1) for batch in self.batches()])

    @cached_property
    def values(self) -> Tensor:
        """[R, ...], mapped from the file: the system reads pages on demand, and takes them back."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._check_disk()
        remove = weakref.finalize(self, self.path.unlink, missing_ok=True)
        try:
            with self.path.open("wb") as file:
                for batch in self.batches():
                    torch.from_numpy(batch.copy()).to(self.dtype).numpy().tofile(file)
        except BaseException:
            remove()
            raise
        total = math.prod(self.shape)
        return torch.from_file(str(self.path), size=total, dtype=self.dtype).view(self.shape)

    def _check_disk(self) -> None:
        """Raise UserError, with the numbers, where the file does not fit the disk."""
        needed = math.prod(self.shape) * self.dtype.itemsize
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise UserError(
                f"{self.path.parent}: a column of the traces needs a temporary file of"
                f" {size(needed)}, and its disk has {size(free)} left. Free some space, or set"
                " paths.checkpoints to another disk."
            )


class Rows:
    """The rows `index` [R] of a column. `rows[chosen]` reads some of them: [B, ...] float32."""

    def __init__(self, column: Column, index: Tensor):
        self.column, self.index = column, index

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows."""
        return len(self), *self.column.shape[1:]

    def __getitem__(self, chosen: Tensor | slice) -> Tensor:
        return self.column.values[self.index[chosen]].float()

    def where(self, chosen: Tensor) -> "Rows":
        """Those of the rows at the indices `chosen`; nothing is read."""
        return Rows(self.column, self.index[chosen])

    def mean(self) -> Tensor:
        """[R, ...]: the means over the second dimension."""
        return self.column.mean()[self.index]


def columns(
    store: "TraceStore", split: str, folder: Path
) -> tuple[dict[str, np.ndarray], dict[str, Column]]:
    """Columns of one split: numbers and strings [R] in memory, the others in files of `folder`.

    The files' names are known to `remove_temporaries`, if this process is killed. Neither holds
    anything if the split has no roots.
    """
    first = next(store.batches(split), {})
    tensors = [name for name, values in first.items() if values.ndim > 1]
    small = store.read(split, [name for name in first if name not in tensors]) if first else {}
    large = {}
    for name in tensors:
        path = folder / f".{split}-{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        dtype = torch.half if name.startswith("h_") else torch.float32
        batches = partial(_batches, store, split, name)
        shape = len(small["context"]), *first[name].shape[1:]
        large[name] = Column(batches, path, dtype, shape)
    return small, large


def _batches(store: "TraceStore", split: str, name: str) -> Iterator[np.ndarray]:
    for batch in store.batches(split, [name]):
        if not np.isfinite(batch[name]).all():
            raise UserError(
                f"{store.folder}: {name} holds NaN or infinite values; make the traces again"
                " (force=true)."
            )
        yield batch[name]
