"""The trace store: Parquet shards and their entries, in a folder or at an fsspec URL.

It knows nothing of models.

Several processes may write shards of one store at the same time. Each shard gets an entry, a small
JSON file beside it with its rows, split and checksum, so that nothing is rewritten as the store
grows. `finish` gathers the entries in `shards.json`:

    traces-00000-of-00002.parquet   columns of the roots of one unit of work
    traces-00000-of-00002.json      {"format": 3, "shard": {"rows": 64, "split": "train", "sha256":
    ...}}; gone after `finish` shards.json                     {"format": 3, "shards":
    {"traces-00000-of-00002.parquet": {"rows": 64, ...}, ...}}

`datasets.load_dataset("parquet", data_files="<folder>/*.parquet")` reads the shards.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import (
    SEAL,
    content_digest,
    read_json,
    unreadable,
    write_atomically,
)
from nde_talf.decoding.common.formats import Format

INDEX = "shards.json"


class Shard(TypedDict):
    """The entry of a shard. rows: 0 where it has no file, and then no sha256 either."""

    rows: int
    sha256: str | None
    split: NotRequired[str]


class Content(TypedDict):
    """Content of `shards.json` (shards), or of the file beside a shard (shard)."""

    shard: NotRequired[Shard]
    shards: NotRequired[dict[str, Shard]]


FORMAT = Format("trace store", "make the traces again with stage=traces force=true", Content)
ELSEWHERE = "store.json"
"""The file of a folder whose shards are at a URL: {"url": ...}."""
OWNER = "owner.json"
"""The file of a store elsewhere that says which folder names it: {"owner": ...}."""


class RemotePath:
    """What a store needs of a `Path`, for a file or folder on an fsspec file system.

    Raises UserError for a URL of an unknown kind, or of one whose library is not installed.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        local = {"auto_mkdir": True} if self.url.startswith(("file://", "local://")) else {}
        try:
            self.fs, self.path = url_to_fs(self.url, **local)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"traces.store={self.url}: it cannot be opened here ({error}). Install what it"
                " needs, or give another URL."
            ) from error

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def exists(self) -> bool:
        return self.fs.exists(self.path)

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        self.fs.invalidate_cache()
        return (self / found.rpartition("/")[2] for found in self.fs.glob(f"{self.path}/{pattern}"))

    def open(self, mode: str) -> Any:
        return self.fs.open(self.path, mode)

    def read_bytes(self) -> bytes:
        return self.fs.cat_file(self.path)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.exists():
            self.fs.rm_file(self.path)


class TraceStore:
    """Reads and writes shards.

    Entries that other processes write after this was made are not seen by it.

    Args:
        folder: a folder, or an fsspec URL such as "s3://bucket/traces". A folder with a
            `store.json` stands for the URL in it.
        kind: how the names of shards begin.
    """

    def __init__(self, folder: Path | str, kind: str = "traces"):
        folder = (elsewhere(folder) if isinstance(folder, Path) else None) or folder
        self.folder = RemotePath(folder) if "://" in str(folder) else Path(folder)
        self.kind = kind
        self.shards: dict[str, Shard] = self._entries()
        self._intact: set[str] = set()

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
        """What is wrong with a shard that has an entry, in words; None if nothing.

        One without rows has no file.
        """
        entry, path = self.shards[name], self.folder / name
        if not entry["rows"]:
            return None
        if not path.exists():
            return "the file is missing"
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            return "its checksum is not the one it was written with"
        try:
            rows = pq.read_metadata(pa.BufferReader(data)).num_rows
        except (OSError, pa.ArrowException) as error:
            return f"it is no Parquet file ({error})"
        if rows != entry["rows"]:
            return f"it has {rows} rows instead of {entry['rows']}"
        self._intact.add(name)
        return None

    def faults(self) -> dict[str, str]:
        """Every shard that is not as it was written, and why."""
        return {name: fault for name in sorted(self.shards) if (fault := self.fault(name))}

    def write(self, name: str, columns: dict[str, list | Tensor]) -> int:
        """Write one shard, then its entry.

        A shard without columns gets only the entry. Returns its rows.
        """
        table, file = arrow_table(columns), io.BytesIO()
        entry = {"rows": table.num_rows, "sha256": None}
        if columns:
            text = [name for name, column in columns.items() if isinstance(column, list)]
            pq.write_table(
                table, file, compression="zstd", use_dictionary=text
            )  # a third of the time for numbers
            entry["sha256"] = hashlib.sha256(file.getbuffer()).hexdigest()
            self._put(name, file.getvalue())
        if "split" in columns:
            entry["split"] = columns["split"][0]  # a shard is of one split
        self._put_json(_entry_name(name), {"shard": entry})
        self.shards[name] = entry
        return table.num_rows

    def finish(self) -> None:
        """Gather the entries of all processes in `shards.json`.

        Call it when no process writes any more.
        """
        if not list(self.folder.glob(f"{self.kind}-*.json")):
            return
        self.shards = self._entries()
        self._put_json(INDEX, {"shards": dict(sorted(self.shards.items()))})
        for name in self.shards:
            (self.folder / _entry_name(name)).unlink(missing_ok=True)

    @property
    def owner(self) -> str | None:
        """Who began this store; None: nobody did."""
        path = self.folder / OWNER
        return read_json(path).get("owner") if path.exists() else None

    def begin(self, owner: str) -> None:
        """Note who writes this store."""
        self._put_json(OWNER, {"owner": owner})

    def clear(self) -> None:
        """Delete all shards."""
        for name in (INDEX, *self.shards, *map(_entry_name, self.shards)):
            (self.folder / name).unlink(missing_ok=True)
        self.shards = {}

    def lists(self, name: str) -> dict[str, list]:
        """One shard as plain lists."""
        return self._table(name).to_pydict()

    def read(self, split: str, columns: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The shards of one split as columns (all, or those named): strings [R], numbers [R],
        features [R, H], labels [R, s, A].

        Empty if it has no roots. Only files of this split are opened and checked.
        """
        batches = list(self.batches(split, columns))
        return {
            name: np.concatenate([batch[name] for batch in batches])
            for name in (batches[0] if batches else ())
        }

    def batches(
        self, split: str, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """`read`, one shard after the other."""
        names = sorted(name for name, shard in self.shards.items() if shard["rows"])
        if not names:
            raise UserError(f"{self.folder}: it holds no traces; run stage=traces first.")
        for name in names:
            entry = self.shards[name]
            if "split" not in entry:  # up to format 2
                entry["split"] = self._table(name, ["split"])["split"][0].as_py()
            if entry["split"] == split:
                table = self._table(name, columns)
                yield {
                    column: _values(table[column].combine_chunks()) for column in table.column_names
                }

    def _table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """The shard, or some of its columns. Its checksum is looked at the first time."""
        if name not in self._intact and (fault := self.fault(name)):
            raise UserError(
                f"{self.folder / name}: {fault}. Run stage=traces again: only what is broken is"
                " made anew."
            )
        try:
            with (self.folder / name).open("rb") as file:
                return pq.read_table(file, columns=columns and list(columns))
        except (OSError, pa.ArrowException) as error:
            raise unreadable(self.folder / name, error, "delete it and run stage=traces") from error

    def _entries(self) -> dict[str, dict]:
        """The entries of `shards.json`, and those written since."""
        found: dict[str, Shard] = (
            self._loaded(INDEX)["shards"] if (self.folder / INDEX).exists() else {}
        )
        for path in self.folder.glob(f"{self.kind}-*.json"):
            found[path.name.removesuffix(".json") + ".parquet"] = self._loaded(path.name)["shard"]
        for name in found:  # files of these names are read, written and deleted
            if not re.fullmatch(rf"{re.escape(self.kind)}-[A-Za-z0-9_-]+\.parquet", name):
                raise UserError(
                    f"{self.folder / INDEX}: {name!r} is no name of a shard. Take a good copy, or"
                    f" {FORMAT.again}."
                )
        return found

    def _loaded(self, name: str) -> Content:
        """The content of one JSON file: the index, or the entry of a shard."""
        content = FORMAT.load(self.folder / name)
        if (key := "shards" if name == INDEX else "shard") not in content:
            raise UserError(
                f"{self.folder / name}: its key {key!r} is missing. Take a good copy, or"
                f" {FORMAT.again}."
            )
        return content

    def _put_json(self, name: str, content: dict[str, Any]) -> None:
        content = {"format": FORMAT.number, **content}
        self._put(
            name, (json.dumps({**content, SEAL: content_digest(content)}, indent=2) + "\n").encode()
        )

    def _put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        if isinstance(path, Path):
            write_atomically(path, lambda temporary: temporary.write_bytes(data))
        else:
            path.fs.pipe_file(path.path, data)


def elsewhere(folder: Path) -> str | None:
    """The URL that a folder stands for; None if its shards are its own.

    Raises UserError if its `store.json` names none.
    """
    if not (folder / ELSEWHERE).exists():
        return None
    url = read_json(folder / ELSEWHERE, dict[str, str], FORMAT.again).get("url", "")
    if "://" not in url:
        raise UserError(
            f"{folder / ELSEWHERE}: it names no URL of a trace store. Take a good copy, or"
            f" {FORMAT.again}."
        )
    return url


def _entry_name(name: str) -> str:
    return name.removesuffix(".parquet") + ".json"


def arrow_table(columns: dict[str, list | Tensor]) -> pa.Table:
    """Lists, and tensors [R, ...], as columns."""
    return pa.table({key: _array(value) for key, value in columns.items()})


def _array(column: list | Tensor) -> pa.Array:
    """A list or tensor [R, ...] as an Arrow column: of fixed-size lists of its last dimension, in
    lists of those between, whose sizes (super-trees a root) may differ from split to split of one
    table.
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
    """The array [R, ...] of a column whose lists of one level are equally long."""
    shape = [len(column)]
    while pa.types.is_nested(column.type):
        values = column.flatten()
        shape.append(len(values) // len(column))
        column = values
    return column.to_numpy(zero_copy_only=False).reshape(shape)
