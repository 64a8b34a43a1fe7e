"""The trace store: Parquet shards, each written atomically, and an index of their row counts and checksums to resume from.

`datasets.load_dataset("parquet", data_files="<folder>/*.parquet")` reads it. This module knows nothing of models.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from decoding.common.errors import UserError
from decoding.common.files import checksum, write_atomically, write_sealed
from decoding.common.formats import Format

INDEX = "shards.json"
FORMAT = Format("trace store", 2, 2, "make the traces again with stage=traces force=true", {1: dict})


class TraceStore:
    """Writes and reads `<folder>/<kind>-<i>-of-<n>.parquet` and `<folder>/shards.json`."""

    def __init__(self, folder: Path, kind: str = "traces"):
        self.folder, self.kind = folder, kind
        self.index = folder / INDEX
        self.shards: dict[str, dict] = FORMAT.load(self.index)["shards"] if self.index.exists() else {}

    def name(self, shard: int, shards: int) -> str:
        return f"{self.kind}-{shard:05d}-of-{shards:05d}.parquet"

    @property
    def roots(self) -> int:
        """Rows of all shards together."""
        return sum(shard["rows"] for shard in self.shards.values())

    def holds(self, name: str) -> bool:
        """Whether a shard is finished and undamaged."""
        return name in self.shards and self.fault(name) is None

    def fault(self, name: str) -> str | None:
        """What is wrong with a shard of the index, in words; None if nothing. One without rows has no file."""
        if not self.shards[name]["rows"]:
            return None
        path = self.folder / name
        if not path.exists():
            return "the file is missing"
        if checksum(path) != self.shards[name]["sha256"]:
            return "its checksum is not the one it was written with"
        if (rows := pq.read_metadata(path).num_rows) != self.shards[name]["rows"]:
            return f"it has {rows} rows instead of {self.shards[name]['rows']}"
        return None

    def faults(self) -> dict[str, str]:
        """Every shard that is not as it was written, and why."""
        return {name: fault for name in sorted(self.shards) if (fault := self.fault(name))}

    def write(self, name: str, columns: dict[str, list | Tensor]) -> None:
        """Write one shard, then enter it in the index. A shard without columns gets only the entry."""
        table = arrow_table(columns)
        path = self.folder / name
        if columns:
            write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
        self.shards[name] = {"rows": table.num_rows, "sha256": checksum(path) if columns else None}
        write_sealed(self.index, {"format": FORMAT.number, "shards": dict(sorted(self.shards.items()))})

    def lists(self, name: str) -> dict[str, list]:
        """One shard as plain lists."""
        return pq.read_table(self.folder / name).to_pydict()

    def read(self, split: str) -> dict[str, np.ndarray]:
        """The shards of one split as columns: strings [R], numbers [R], features [R, H], labels [R, s, A]. Empty if it has no
        roots."""
        names = sorted(name for name, shard in self.shards.items() if shard["rows"])
        if not names:
            raise UserError(f"{self.folder}: it holds no traces; run stage=traces first.")
        for name, fault in self.faults().items():
            raise UserError(f"{self.folder / name}: {fault}. Run stage=traces again: only what is broken is made anew.")
        try:
            tables = [pq.read_table(self.folder / name) for name in names]
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.folder}: a shard cannot be read ({error}); delete it and run stage=traces.") from error
        tables = [table for table in tables if table["split"][0].as_py() == split]  # a shard is of one split
        if not tables:
            return {}
        table = pa.concat_tables(tables)
        return {name: _values(table[name].combine_chunks()) for name in table.column_names}


def arrow_table(columns: dict[str, list | Tensor]) -> pa.Table:
    """Lists, and tensors [R, ...], as columns."""
    return pa.table({key: _array(value) for key, value in columns.items()})


def _array(column: list | Tensor) -> pa.Array:
    """A list or tensor [R, ...] as an Arrow column: of fixed-size lists of its last dimension, in lists of those between, whose
    sizes (super-trees a root) may differ from split to split of one table."""
    if isinstance(column, list):
        return pa.array(column)
    array, sizes = pa.array(column.contiguous().numpy().ravel()), column.shape[1:]
    if sizes:
        array = pa.FixedSizeListArray.from_arrays(array, sizes[-1])
    for size in reversed(sizes[:-1]):
        array = pa.ListArray.from_arrays(pa.array(range(0, len(array) + 1, size), pa.int32()), array)
    return array


def _values(column: pa.Array) -> np.ndarray:
    """The array [R, ...] of a column whose lists of one level are equally long."""
    shape = [len(column)]
    while pa.types.is_nested(column.type):
        values = column.flatten()
        shape.append(len(values) // len(column))
        column = values
    return column.to_numpy(zero_copy_only=False).reshape(shape)
