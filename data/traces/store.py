"""The trace store: a folder of Parquet shards and an index.

    traces-00000-of-00002.parquet   columns of the roots of one unit of work
    shards.json                     {"format": 1, "shards": {"traces-00000-of-00002.parquet":
                                    {"rows": 64, "split": "train", "sha256": ...}, ...}}

Several processes may write shards of one store at the same time (`write_shard`); one of them enters
all in the index (`enter`). `datasets.load_dataset("parquet", data_files="<folder>/*.parquet")`
reads the shards.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor
from typing_extensions import TypedDict

from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading, write_atomically, write_sealed
from nde_talf.decoding.common.formats import Format

INDEX = "shards.json"


class Shard(TypedDict):
    """The entry of a shard. One without rows has no file, no sha256 and no split."""

    rows: int
    sha256: str | None
    split: Literal["train", "validation"] | None


class Index(TypedDict):
    """Content of `shards.json`."""

    shards: dict[str, Shard]


FORMAT = Format("trace store", "make the traces again with stage=traces force=true", Index)


class TraceStore:
    """Read and write shards.

    Shards that another process enters after this was made are not seen by it.

    Args:
        folder: of the shards.
        kind: how the names of shards begin.
    """

    def __init__(self, folder: Path | str, kind: str = "traces"):
        self.folder, self.kind = Path(folder), kind
        self.shards: dict[str, Shard] = self._entries()
        self._intact: set[str] = set()

    def name(self, shard: int, shards: int) -> str:
        """Name shard number `shard` of so many."""
        return f"{self.kind}-{shard:05d}-of-{shards:05d}.parquet"

    @property
    def roots(self) -> int:
        """Rows of all shards together."""
        return sum(shard["rows"] for shard in self.shards.values())

    def holds(self, name: str) -> bool:
        """Tell whether a shard is finished and undamaged."""
        return name in self.shards and self.fault(name) is None

    def fault(self, name: str) -> str | None:
        """Say in words how a shard with an entry differs from what was written; None if not."""
        if not self.shards[name]["rows"]:
            return None
        if not (self.folder / name).exists():
            return "the file is missing"
        if file_digest(self.folder / name) != self.shards[name]["sha256"]:
            return "its checksum is not the one it was written with"
        self._intact.add(name)
        return None

    def faults(self) -> dict[str, str]:
        """Find every shard that is not as it was written, and why."""
        return {name: fault for name in sorted(self.shards) if (fault := self.fault(name))}

    def write(self, name: str, columns: Mapping[str, list | Tensor]) -> None:
        """Write one shard, and enter it."""
        self.enter(name, self.write_shard(name, columns))

    def write_shard(self, name: str, columns: Mapping[str, list | Tensor]) -> Shard:
        """Write one shard, which is not entered yet, and return its entry.

        A shard without columns has no file.
        """
        table = pa.table({key: _array(value) for key, value in columns.items()})
        entry = Shard(rows=table.num_rows, sha256=None, split=None)
        if columns:
            # A dictionary of numbers triples the time.
            text = [name for name, column in columns.items() if isinstance(column, list)]
            write = partial(pq.write_table, table, compression="zstd", use_dictionary=text)
            write_atomically(self.folder / name, write)
            entry["sha256"] = file_digest(self.folder / name)
        if "split" in columns:
            entry["split"] = cast("Any", columns["split"])[0]  # a shard is of one split
        return entry

    def enter(self, name: str, entry: Shard) -> None:
        """Enter a written shard in the index."""
        self.shards[name] = entry
        content = {"format": FORMAT.number, "shards": dict(sorted(self.shards.items()))}
        write_sealed(self.folder / INDEX, content)

    def lists(self, name: str) -> dict[str, list]:
        """Read one shard as plain lists."""
        return self._table(name).to_pydict()

    def read(self, split: str) -> dict[str, np.ndarray]:
        """Read the shards of one split as columns.

        Strings and numbers are [R], features [R, H], labels [R, s, A]; {} without roots.
        Only files of this split are opened and checked. The arrays may be written to.
        """
        if not self.roots:
            raise UserError(f"{self.folder}: it holds no traces; run stage=traces first.")
        tables = [
            self._table(name)
            for name, entry in sorted(self.shards.items())
            if entry["rows"] and entry["split"] == split
        ]
        if not tables:
            return {}
        table = pa.concat_tables(tables)
        return {name: _values(table[name].combine_chunks()).copy() for name in table.column_names}

    def _table(self, name: str) -> pa.Table:
        """Read a shard. Its checksum is looked at the first time."""
        if name not in self._intact and (fault := self.fault(name)):
            raise UserError(
                f"{self.folder / name}: {fault}. Run stage=traces again: only what is broken is"
                " made anew."
            )
        path = self.folder / name
        with reading(path, "delete it and run stage=traces"):
            return pq.read_table(path)

    def _entries(self) -> dict[str, Shard]:
        """Read the index."""
        path = self.folder / INDEX
        entries: dict[str, Shard] = FORMAT.load(path)["shards"] if path.exists() else {}
        for name in entries:  # files of these names are read and written
            if not re.fullmatch(rf"{re.escape(self.kind)}-[A-Za-z0-9_-]+\.parquet", name):
                raise UserError(
                    f"{path}: {name!r} is no name of a shard. Take a good copy, or {FORMAT.again}."
                )
        return entries


def _array(column: list | Tensor) -> pa.Array:
    """Make an Arrow column of a list or tensor [R, ...].

    A tensor's last dimension becomes fixed-size lists; those between become lists, whose sizes
    (super-trees a root) may differ from split to split of one table.
    """
    if isinstance(column, list):
        return pa.array(column)
    array, sizes = pa.array(column.contiguous().numpy().ravel()), column.shape[1:]
    if sizes:
        array = pa.FixedSizeListArray.from_arrays(array, sizes[-1])
    for size in reversed(sizes[:-1]):
        array = pa.ListArray.from_arrays(
            pa.array(range(0, len(array) + 1, size), pa.int32()), array
        )
    return array


def _values(column: pa.Array) -> np.ndarray:
    """Make an array [R, ...] of a column whose lists of one level are equally long."""
    shape = [len(column)]
    while pa.types.is_nested(column.type):
        values = column.flatten()
        shape.append(len(values) // len(column))
        column = values
    return column.to_numpy(zero_copy_only=False).reshape(shape)
