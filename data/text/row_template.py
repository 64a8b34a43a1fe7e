"""Rows of a dataset rendered as texts: a Python format string over the columns."""

import re
import warnings
from dataclasses import dataclass
from string import Formatter
from typing import Any

from nde_talf.decoding.common.errors import Advice, UserError

WIDEST = 1000
"""Largest width in a format, such as {number:>8}."""


@dataclass(frozen=True)
class RowTemplate:
    """A format string over the columns of a dataset's rows, such as "{question}" or
    "{translation[en]}".

    Attributes:
        template: the format string. A column that holds a list of turns gives its first human turn.
        source: the dataset, for error messages.
        key: the setting that holds the template, for error messages.
    """

    template: str
    source: str
    key: str

    def columns(self) -> list[str]:
        """The columns that the template asks for.

        Raises UserError if it is no format string, follows attributes, or asks for a text wider
        than WIDEST.
        """
        try:
            parts = [
                (name, spec or "")
                for _, name, spec, _ in Formatter().parse(self.template)
                if name is not None
            ]
        except ValueError as error:
            raise UserError(
                f"{self.key}={self.template!r} is no format string: {error}. Double a literal"
                " brace."
            ) from error
        for name, spec in parts:
            if "." in re.sub(r"\[[^\]]*\]", "", name):
                raise UserError(
                    f"{self.key}={self.template!r}: {{{name}}} asks for an attribute; use [...]."
                )
            if "{" in spec or any(int(number) > WIDEST for number in re.findall(r"\d+", spec)):
                raise UserError(
                    f"{self.key}={self.template!r}: the format {spec!r} asks for a width of more"
                    f" than {WIDEST}."
                )
        return [name.split("[")[0] for name, _ in parts]

    def check(self, columns: list[str]) -> None:
        """Raise UserError for a template that `columns()` refuses, or that asks for a column that
        is not among `columns`.
        """
        missing = [name for name in self.columns() if name not in columns]
        if missing:
            raise UserError(
                f"{self.key} asks for the column {missing[0]!r}, which {self.source!r} does not"
                f" have; its columns are {', '.join(columns) or 'none'}."
            )

    def render(self, row: dict[str, Any]) -> str:
        """The text of one row. Raises UserError where the row does not fit."""
        try:
            return self.template.format(**{name: self._value(value) for name, value in row.items()})
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.key}={self.template!r} does not fit {self.source!r}"
                f" ({type(error).__name__}: {error}), where a row is {str(row)[:200]}."
            ) from error

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return _Turns([_text(turn) for turn in _human(value)])
        value = "" if value is None else value
        return _Watched(value, self) if isinstance(value, str) else value


class _Turns(str):
    """The first turn of a list; "{column[1]}" is the second."""

    def __new__(cls, turns: list[str]):
        own = super().__new__(cls, turns[0] if turns else "")
        own.turns = turns
        return own

    def __getitem__(self, index):
        return self.turns[index]


class _Watched(str):
    """A text that gives a warning where a template takes a single character of it."""

    def __new__(cls, text: str, template: RowTemplate):
        own = super().__new__(cls, text)
        own.template = template
        return own

    def __getitem__(self, index):
        own = self.template
        warnings.warn(
            f"{own.key}={own.template!r} takes one character of a text of {own.source!r}: [{index}]"
            " picks an item of a list or a field of a record. Leave it out to get the full text.",
            Advice,
            stacklevel=2,
        )
        return str(self)[index]


def _human(turns: list) -> list:
    """The human turns of a conversation; any other list as it is."""
    if turns and isinstance(turns[0], dict):
        return [turn for turn in turns if turn.get("from", turn.get("role")) in ("human", "user")]
    return turns


def _text(turn: Any) -> str:
    """The text of one turn; nothing (None) is an empty text."""
    if isinstance(turn, dict):
        turn = turn.get("value", turn.get("content"))
    return "" if turn is None else str(turn)
