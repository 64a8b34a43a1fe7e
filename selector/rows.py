"""Columns of traced roots that are larger than memory, in temporary files read by row.

At the NDE paper's scale, 448,000 training roots, hidden states in half precision take 6 to 15 GB
and labels 10 GB. A training step needs 128 rows of them.
"""

import math
import mmap
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
WINDOW = 1 << 30
"""Bytes of a file that this process holds mapped at once.

More of it may stay in the system's cache, which gives way.
"""
MAPPED = 1 << 16
"""Bytes that the system maps at most for one row that is read."""


class Column:
    """Rows [R, ...] of one column, in a file.

    It is written when a row is first read, and deleted with this object.

    Args:
        batches: yields arrays [r, ...] whose rows are those of the column, in order.
        path: of the file.
        dtype: float16 or float32, of the file. Rows are read as float32.
        count: R.
    """

    def __init__(self, batches: Batches, path: Path, dtype: torch.dtype, count: int):
        self.batches, self.path, self.dtype, self.count = batches, path, dtype, count
        self._touched = 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""
        return next(iter(self.batches())).shape[1:]

    def read(self, index: Tensor) -> Tensor:
        """The rows at `index` [B]: [B, ...] float32."""
        mapping, values = self._file
        found = values[index].float()
        self._touched += len(index) * max(values[0].nbytes, MAPPED)
        if self._touched > WINDOW:
            mapping.madvise(mmap.MADV_DONTNEED)
            self._touched = 0
        return found

    def mean(self) -> Tensor:
        """[R, ...]: the means over the second dimension. It writes no file."""
        return torch.cat([torch.from_numpy(batch.copy()).mean(1) for batch in self.batches()])

    @cached_property
    def _file(self) -> tuple[mmap.mmap, Tensor]:
        """The mapped file and its values [R, ...]."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._check_disk()
            remove = weakref.finalize(self, self.path.unlink, missing_ok=True)
            try:
                with self.path.open("wb") as file:
                    for batch in self.batches():
                        batch.astype(
                            "float16" if self.dtype == torch.half else "float32", copy=False
                        ).tofile(file)
            except BaseException:
                remove()
                raise
        with self.path.open("rb") as file:
            mapping = mmap.mmap(
                file.fileno(), 0, access=mmap.ACCESS_COPY
            )  # torch wants memory that it could write to
        return mapping, torch.frombuffer(mapping, dtype=self.dtype).view(-1, *self.shape)

    def _check_disk(self) -> None:
        """Raise UserError, with the numbers, where the file does not fit the disk."""
        needed, free = (
            self.count * math.prod(self.shape) * self.dtype.itemsize,
            shutil.disk_usage(self.path.parent).free,
        )
        if needed > free:
            raise UserError(
                f"{self.path.parent}: a column of the traces needs a temporary file of"
                f" {size(needed)}, and its disk has {size(free)} left. Free some space, or set"
                " paths.checkpoints to another disk."
            )

    def __getstate__(self) -> dict:
        """For another process on this machine: it maps the same file."""
        self._file  # noqa: B018 (written here, so that the other process finds it)
        state = self.__dict__ | {"shape": self.shape, "batches": None}
        del state["_file"]
        return state


class Rows:
    """The rows `index` [R] of a column. `rows[chosen]` reads some of them: [B, ...] float32."""

    def __init__(self, column: Column, index: Tensor):
        self.column, self.index = column, index

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows."""
        return len(self), *self.column.shape

    def __getitem__(self, chosen: Tensor | slice) -> Tensor:
        return self.column.read(self.index[chosen])

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
    large, names = {}, [name for name, values in first.items() if values.ndim > 1]
    small = store.read(split, [name for name in first if name not in names]) if first else {}
    for name in names:
        path = folder / f".{split}-{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        dtype = torch.half if name.startswith("h_") else torch.float32
        large[name] = Column(
            partial(_batches, store, split, name), path, dtype, len(small["context"])
        )
    return small, large


def _batches(store: "TraceStore", split: str, name: str) -> Iterator[np.ndarray]:
    for batch in store.batches(split, [name]):
        if not np.isfinite(batch[name]).all():
            raise UserError(
                f"{store.folder}: {name} holds NaN or infinite values; make the traces again"
                " (force=true)."
            )
        yield batch[name]
