"""Rows of a dataset rendered as texts: a Python format string over the columns."""

import re
from dataclasses import dataclass
from string import Formatter
from typing import Any

from nde_talf.decoding.common.errors import UserError

WIDEST = 1000
"""Largest width in a format, such as {number:>8}."""


@dataclass(frozen=True)
class RowTemplate:
    """A format string over the columns of a dataset's rows.

    Examples: "{question}", "{translation[en]}". As a text, a list of turns is its first human turn,
    "{turns[1]}" the second.

    Attributes:
        template: the format string.
        source: the dataset, for error messages.
        key: the setting that holds the template, for error messages.
    """

    template: str
    source: str
    key: str

    @property
    def columns(self) -> list[str]:
        """The columns that it asks for."""
        return [name.split("[")[0] for _, name, *_ in Formatter().parse(self.template) if name]

    @property
    def column(self) -> str | None:
        """The column that it shows without a word more, as {messages} does."""
        return next((name for name in self.columns if self.template == f"{{{name}}}"), None)

    def bare(self, text: str) -> str:
        """Return a rendered text, stripped, without the words that the template puts around it."""
        parts = [*Formatter().parse(self.template)]
        after = parts[-1][0] if parts[-1][1] is None else ""
        return text.removeprefix(parts[0][0].lstrip()).removesuffix(after.rstrip())

    def check(self, columns: list[str] | None = None) -> None:
        """Raise UserError for a template that does not fit `columns` (None: not known yet).

        It is no format string, follows attributes, is wider than WIDEST, or asks for a column that
        is not there.
        """
        try:
            parsed = list(Formatter().parse(self.template))
        except ValueError as error:
            raise UserError(
                f"{self.key}={self.template!r} is no format string: {error}. Double a literal"
                " brace."
            ) from error
        for _, name, spec, _ in parsed:
            if name is None or spec is None:  # the text after the last field
                continue
            if "." in re.sub(r"\[[^\]]*\]", "", name):
                raise UserError(
                    f"{self.key}={self.template!r}: {{{name}}} asks for an attribute; use [...]."
                )
            if "{" in spec or any(int(number) > WIDEST for number in re.findall(r"\d+", spec)):
                raise UserError(
                    f"{self.key}={self.template!r}: the format {spec!r} asks for a width of more"
                    f" than {WIDEST}."
                )
            column = name.split("[")[0]
            if columns is not None and column not in columns:
                raise UserError(
                    f"{self.key} asks for the column {column!r}, which {self.source!r} does not"
                    f" have; its columns are {', '.join(columns) or 'none'}."
                )

    def render(self, row: dict[str, Any]) -> str:
        """Render one row. Raises UserError where the row does not fit."""
        try:
            if isinstance(row.get(self.column or ""), dict):
                raise TypeError("it holds no text")
            return self.template.format(**{name: _value(value) for name, value in row.items()})
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.key}={self.template!r} does not fit {self.source!r}"
                f" ({type(error).__name__}: {error}), where a row is {str(row)[:200]}."
            ) from error


class _Turns(list[str]):
    """Texts of turns: "{column[1]}" is the second, and "{column}" the first."""

    def __format__(self, spec: str) -> str:
        return format(self[0] if self else "", spec)


def _value(value: Any) -> Any:
    if not isinstance(value, list):
        return "" if value is None else value
    if value and isinstance(value[0], dict):  # a conversation
        value = [
            turn for turn in value if (turn.get("from") or turn.get("role")) in ("human", "user")
        ]
    return _Turns(map(text_of, value))


def text_of(turn: Any) -> str:
    """Return what a turn says, which may be in parts; "" where one is no text, as an image is."""
    if isinstance(turn, dict):
        turn = turn.get("content") if turn.get("value") is None else turn["value"]
    if isinstance(turn, list):
        texts: list[Any] = [isinstance(part, dict) and part.get("text") for part in turn]
        turn = "".join(texts) if all(isinstance(text, str) for text in texts) else ""
    return "" if turn is None else str(turn)
