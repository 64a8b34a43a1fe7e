"""Rows of a dataset rendered as texts: a Python format string over the columns."""

from dataclasses import dataclass
from string import Formatter
from typing import Any

from decoding.errors import UserError


@dataclass(frozen=True)
class RowTemplate:
    """`template` over the rows of `source`; `key` is the setting that holds it, for error messages."""

    template: str
    source: str
    key: str

    def check(self, columns: list[str]) -> None:
        """Raise UserError if the template is no format string, or asks for a column that is not among `columns`."""
        try:
            named = [name for _, name, _, _ in Formatter().parse(self.template) if name is not None]
        except ValueError as error:
            raise UserError(
                f"{self.key}={self.template!r} is no format string: {error}. Write a literal brace twice."
            ) from error
        missing = [name for name in (n.split("[")[0].split(".")[0] for n in named) if name not in columns]
        if missing:
            raise UserError(
                f"{self.key} asks for the column {missing[0]!r}, which {self.source!r} has not; its columns are "
                f"{', '.join(columns) or 'none'}."
            )

    def render(self, row: dict[str, Any]) -> str:
        """The text of one row. Raises UserError where the row does not fit."""
        try:
            return self.template.format(**{name: _first_turn(value) for name, value in row.items()})
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.key}={self.template!r} does not fit {self.source!r} ({type(error).__name__}: {error}), where "
                f"a row is {str(row)[:200]}."
            ) from error


def _first_turn(value: Any) -> Any:
    """Of a conversation the first human turn, of another list its first item; nothing (None) is an empty text."""
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            people = (turn for turn in value if turn.get("from", turn.get("role")) in ("human", "user"))
            first = next(people, {})
            value = first.get("value", first.get("content"))
        else:
            value = value[0] if value else None
    return "" if value is None else value
