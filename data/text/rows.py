"""Rows of files: JSON as it is written, line by line, and several tables as one.

No type is guessed across rows: a date stays a string, and a key may be missing, null or of another
type in the next row. Imports no library that reads data.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.files import reading

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

    A file that is one list of rows, or one row on several lines, is read whole. A row that is a
    text has the column text.

    Attributes:
        column_names: keys of all rows, in the order in which they first occur.

    Raises:
        UserError: it holds no rows, or a line that is none.
    """

    def __init__(self, path: Path):
        self._rows: Any = array("Q")
        names, start = dict[str, None](), 0
        with reading(path, "mend it"):
            self._file = path.open("rb")
            if not _has_lines(path):
                value = _parsed(self._file.read())
                self._rows = [*map(_row, value if isinstance(value, list) else [value])]
                names = dict.fromkeys(name for row in self._rows for name in row)
            for number, line in enumerate(self._file, 1):
                if line.strip():
                    names |= dict.fromkeys(_row_of(line, number))
                    self._rows.append(start)
                start += len(line)
            if not self._rows:
                raise ValueError("it holds no rows")
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


def _row_of(line: bytes, number: int) -> dict[str, Any]:
    """Read a line; raise ValueError that names its number if it is no row."""
    try:
        return _row(_parsed(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    except UNREADABLE as error:
        raise ValueError(f"line {number}: {error}") from error


def _has_lines(path: Path) -> bool:
    """Tell whether a file has a row a line: its first line is one, or no list in a .jsonl file."""
    with path.open("rb") as file:
        first = next(filter(bytes.strip, file), b"").removeprefix(b"\xef\xbb\xbf")
    try:
        return bool(_row(_parsed(first)))
    except UNREADABLE:
        return path.suffix == ".jsonl" and not first.startswith(b"[")


def _parsed(data: bytes) -> Any:
    """Parse JSON. NaN and infinities, which are no JSON, count as null."""
    text = data.decode("utf-8-sig").rstrip()
    value = json.loads(text, parse_constant=lambda _: None)
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
