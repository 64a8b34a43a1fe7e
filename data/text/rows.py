"""Rows of tables, and of JSON files as they are written. Imports no library that reads data.

No type is guessed across rows: a date stays a string, and a key may be missing, null or of another
type in the next row.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.files import reading

UNREADABLE = ValueError, RecursionError
"""Errors of a text that is no JSON; RecursionError: it is nested too deeply."""


class Rows(Sequence[dict[str, Any]]):
    """The rows of a table.

    Attributes:
        column_names: of all rows, in the order in which they first occur. They are None in rows
            that lack them.
    """

    def __init__(self, table: Any, column_names: Sequence[str] | None = None):
        names = column_names or [name for row in table for name in row]
        self._table, self._none = table, dict.fromkeys(names)
        self.column_names = [*self._none]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        """Return one row."""
        return self._none | self._table[index]


def json_rows(path: Path) -> Rows:
    """Read a JSON file: a row a line, a list of rows, or one row. A text is a row of one column.

    Raises:
        UserError: it holds no rows, or a line that is none.
    """
    with reading(path, "mend it"):
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        try:
            value = _parsed(data)
        except UNREADABLE:
            lines = enumerate(data.split(b"\n"), 1)
            value = [_row_of(line, number) for number, line in lines if line.strip()]
        rows = [*map(_row, value if isinstance(value, list) else [value])]
        if not rows:
            raise ValueError("it holds no rows")
    return Rows(rows)


def _row_of(line: bytes, number: int) -> dict[str, Any]:
    """Read a line; raise ValueError that names its number if it is no row."""
    try:
        return _row(_parsed(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    except UNREADABLE as error:
        raise ValueError(f"line {number}: {error}") from error


def _parsed(data: bytes) -> Any:
    """Parse JSON. NaN and infinities, which are no JSON, count as null."""
    text = data.decode().rstrip()
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
