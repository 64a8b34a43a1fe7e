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

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console


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
    """The rows of a JSON file. Of a file with a row a line only their places are in memory.

    Attributes:
        column_names: keys of all rows, in the order in which they first occur.
        faults: what is wrong with rows that are left out, such as "line 3, column 9: it is ...".
    """

    def __init__(self, path: Path, first: int | None = None):
        self._file, values = path.open("rb"), _list_in(path)
        self._places: Any = array("Q") if values is None else []
        self.faults: list[str] = []
        names, start = dict[str, None](), 0
        for number, line in enumerate(self._file if values is None else values, 1):
            if values is not None or line.strip():
                try:
                    row: Any = _row(line)
                    names |= dict.fromkeys(row)
                    self._places.append(start if values is None else row)
                except (ValueError, RecursionError) as error:
                    unit = "line" if values is None else "row"
                    self.faults.append(f"{unit} {number}{fault_of(error)}")
            start += 0 if values else len(line)
            if len(self) == first:
                break
        self.column_names = [*names]

    @property
    def fault(self) -> str:
        """The first three faults and the number of others; "" without any."""
        others = len(self.faults[3:])
        return "; ".join([*self.faults[:3], *[f"{others} more"] * bool(others)])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """Return one row."""
        place = self._places[index]
        if isinstance(place, dict):
            return place
        self._file.seek(place)
        return _row(self._file.readline())


def json_rows(path: Path, first: int | None = None) -> JsonRows:
    """Read a JSON file with a row a line, or one list of rows, and tell once what is left out.

    A row that is a text has the one column text.

    Args:
        path: of the file.
        first: only so many rows from the beginning.

    Raises:
        UserError: no row can be read.
    """
    state = path.stat()
    return _read(path, first, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, first: int | None, *_: int) -> JsonRows:
    try:
        rows = JsonRows(path, first)
    except (ValueError, RecursionError) as error:
        raise no_rows(path, fault_of(error).strip(",: ")) from None
    if not rows:
        raise no_rows(path, rows.fault or "it holds no rows")
    if rows.fault:
        console.print(f"! {path}: left out {rows.fault} (data.strict=true refuses such files)")
    return rows


def no_rows(path: Path, fault: str) -> UserError:
    """Make the UserError for a file of which no row can be read."""
    return UserError(f"{str(path)!r} cannot be read: {fault}. Mend the file, or give another.")


def _list_in(path: Path) -> list[Any] | None:
    """Return the rows of a file that is one list or one object; None if a row is a line.

    Raises ValueError or RecursionError.
    """
    with path.open("rb") as file:
        begin = next((line for line in file if line.strip()), b"").removeprefix(b"\xef\xbb\xbf")
    if not begin.startswith(b"[") and (path.suffix == ".jsonl" or _is_row(begin)):
        return None
    try:
        value = _parsed(path.read_bytes())
        return value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        if path.suffix == ".json":
            raise
        return None


class _Number(float):
    """A number that is shown as it is written."""

    written: str

    def __new__(cls, written: str) -> "_Number":
        number = super().__new__(cls, written)
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written


def _parsed(data: bytes) -> Any:
    """Parse JSON. NaN and infinities, which are no JSON, count as null."""
    text = data.decode("utf-8-sig").rstrip()
    value = json.loads(text, parse_float=_Number, parse_constant=lambda _: None)
    if "\\u" in text:  # half of a surrogate pair is no text
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _row(line: Any) -> dict[str, Any]:
    """Return a row, which may be a line still. Raises ValueError or RecursionError."""
    row = _parsed(line) if isinstance(line, bytes) else line
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise ValueError('it is no object such as {"text": ...}')
    return row


def _is_row(line: bytes) -> bool:
    try:
        return bool(_row(line))
    except (ValueError, RecursionError):
        return False


def fault_of(error: Exception) -> str:
    """Say what is wrong with a text, after the number of its line: ", byte 5: it is not UTF-8"."""
    match error:
        case RecursionError():
            return ": it is nested too deeply"
        case UnicodeEncodeError():
            return ": it holds half of a surrogate pair"
        case UnicodeDecodeError():
            return f", byte {error.start + 1}: it is not UTF-8"
        case json.JSONDecodeError():
            line = f", line {error.lineno}" * (error.lineno > 1)
            return f"{line}, column {error.colno}: it is no JSON ({error.msg})"
    return f": {error}"
