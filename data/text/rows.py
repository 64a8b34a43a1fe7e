"""Rows of files: JSON as it is written, line by line, and several tables as one.

No type is guessed across rows: a date stays a string, a number keeps its digits, and a key may be
missing, null or of another type in the next row. Imports no library that reads data.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.files import reading
from nde_talf.decoding.common.progress import console

UNREADABLE = ValueError, RecursionError
"""Errors of a text that is no JSON; RecursionError: it is nested too deeply."""


class Rows(Sequence[dict[str, Any]]):
    """The rows of one or several tables, each read when it is asked for.

    Attributes:
        column_names: of all tables, in the order in which they first occur. They are None in rows
            that lack them.
    """

    def __init__(self, tables: Sequence[Any]):
        self._tables, self._starts = tables, [*accumulate(map(len, tables), initial=0)]
        self._none = dict.fromkeys(name for table in tables for name in table.column_names)
        self.column_names = [*self._none]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return one row, counted from 0."""
        table = bisect_right(self._starts, index) - 1
        return self._none | self._tables[table][index - self._starts[table]]


class JsonRows(Sequence[dict[str, Any]]):
    """The rows of a JSON file with a row a line; in memory are only the places of the lines.

    A file that is one list of rows, or one row on several lines, is read whole.

    Attributes:
        column_names: keys of all rows, in the order in which they first occur.
        faults: what is wrong with lines that are left out, such as "line 3: it is ...".
    """

    def __init__(self, path: Path):
        self._file, self.faults = path.open("rb"), list[str]()
        self._rows: Any = array("Q")
        names, start = dict[str, None](), 0
        if not _has_lines(path):
            value = _parsed(self._file.read())
            self._rows = [*map(_row, value if isinstance(value, list) else [value])]
            names = dict.fromkeys(name for row in self._rows for name in row)
        for number, line in enumerate(self._file, 1):
            try:
                if line.strip():
                    names |= dict.fromkeys(_row(_parsed(line)))
                    self._rows.append(start)
            except UNREADABLE as error:
                self.faults.append(f"line {number}{_fault(error)}")
            start += len(line)
        self.column_names = [*names]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Return one row."""
        row = self._rows[index]
        if isinstance(row, dict):
            return row
        self._file.seek(row)
        return _row(_parsed(self._file.readline()))

    @property
    def fault(self) -> str:
        """The first three faults and the number of others; "" without any."""
        others = [f"{len(self.faults) - 3} more"] if len(self.faults) > 3 else []
        return "; ".join([*self.faults[:3], *others])


def json_rows(path: Path) -> JsonRows:
    """Read a JSON file, and tell once what is left out. A row that is a text has the column text.

    Raises:
        UserError: no row can be read.
    """
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, *_: int) -> JsonRows:
    with reading(path, "mend it"):
        rows = JsonRows(path)
        if not rows:
            raise ValueError(rows.fault or "it holds no rows")
    if rows.fault:
        console.print(f"! {path}: left out {rows.fault} (data.strict=true refuses such files)")
    return rows


def _has_lines(path: Path) -> bool:
    """Tell whether a file has a row a line: its first line is one, or no list in a .jsonl file."""
    with path.open("rb") as file:
        first = next(filter(bytes.strip, file), b"").removeprefix(b"\xef\xbb\xbf")
    try:
        return bool(_row(_parsed(first)))
    except UNREADABLE:
        return path.suffix == ".jsonl" and not first.startswith(b"[")


class _Number(float):
    """A number that is shown as it is written."""

    def __init__(self, written: str):
        self._written = written

    def __str__(self) -> str:
        return self._written


def _parsed(data: bytes) -> Any:
    """Parse JSON. NaN and infinities, which are no JSON, count as null."""
    text = data.decode("utf-8-sig").rstrip()
    value = json.loads(text, parse_float=_Number, parse_constant=lambda _: None)
    if "\\u" in text:  # half of a surrogate pair is no text
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _row(value: Any) -> dict[str, Any]:
    """Return a value as a row. Raises ValueError for one that is neither object nor text."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise ValueError('it is no object such as {"text": ...}')
    return value


def _fault(error: Exception) -> str:
    """Say what is wrong with a line, after its number."""
    if isinstance(error, json.JSONDecodeError):
        return f", column {error.colno}: {error.msg}"
    return f": {error}"
