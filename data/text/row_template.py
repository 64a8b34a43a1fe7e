"""Rows of a dataset rendered as texts: a template over the columns."""

import re
from dataclasses import dataclass
from typing import Any

from nde_talf.decoding.common.errors import UserError

PART = re.compile(r"\{\{|\}\}|\{([^{}\[\].:!]+)((?:\[[^{}\[\]]+\])*)\}")
"""A doubled brace, or a column with what is looked up in its value."""


@dataclass(frozen=True)
class RowTemplate:
    """A template over the columns of a dataset's rows.

    Examples: "{question}", "{translation[en]}". As a text, a list of turns is its first human turn,
    "{turns[1]}" the second.

    Attributes:
        template: text with columns in braces.
        source: the dataset, for error messages.
        key: the setting that holds the template, for error messages.
    """

    template: str
    source: str
    key: str

    @property
    def columns(self) -> list[str]:
        """The columns that it asks for."""
        return [part[1] for part in PART.finditer(self.template) if part[1]]

    @property
    def column(self) -> str | None:
        """The column that it shows without a word more, as {messages} does."""
        return next((name for name in self.columns if self.template == f"{{{name}}}"), None)

    def bare(self, text: str) -> str:
        """Return a rendered text, stripped, without the words that the template puts around it."""
        before, *_, after = re.split(r"\{[^{}]+\}", self.template)
        return text.removeprefix(before.lstrip()).removesuffix(after.rstrip())

    def check(self, columns: list[str] | None = None) -> None:
        """Raise UserError for a template that does not fit `columns` (None: not known yet).

        It has single braces, asks for an attribute or a format, or for a column that is not there.
        """
        if re.search("[{}]", PART.sub("", self.template)):
            raise UserError(
                f"{self.key}={self.template!r} is no template: a column is {{question}} or"
                " {translation[en]}, without an attribute, a width or a format. Double a literal"
                " brace."
            )
        for column in self.columns:
            if columns is not None and column not in columns:
                raise UserError(
                    f"{self.key} asks for the column {column!r}, which {self.source!r} does not"
                    f" have; its columns are {', '.join(columns) or 'none'}."
                )

    def render(self, row: dict[str, Any]) -> str:
        """Render one row. Raises UserError where the row does not fit."""
        try:
            return PART.sub(lambda part: _shown(part, row), self.template)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.key}={self.template!r} does not fit {self.source!r}"
                f" ({type(error).__name__}: {error}), where a row is {str(row)[:200]}."
            ) from error


def _shown(part: re.Match[str], row: dict[str, Any]) -> str:
    """Return a part of a template as text: a brace, or a value of the row."""
    if not part[1]:
        return part[0][0]
    value = _turns(row[part[1]])
    for key in re.findall(r"[^\[\]]+", part[2]):
        value = value[int(key)] if isinstance(value, list) else value[key]
    if isinstance(value, list):
        value = value[0] if value else ""
    if isinstance(value, dict):
        raise TypeError("it holds no text")
    return "" if value is None else str(value)


def _turns(value: Any) -> Any:
    """Return a list as the texts of its turns; of a conversation only what the user says."""
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], dict):
        value = [
            turn for turn in value if (turn.get("from") or turn.get("role")) in ("human", "user")
        ]
    return [*map(text_of, value)]


def text_of(turn: Any) -> str:
    """Return what a turn says, which may be in parts; "" where one is no text, as an image is."""
    if isinstance(turn, dict):
        turn = turn.get("content") if turn.get("value") is None else turn["value"]
    if isinstance(turn, list):
        texts: list[Any] = [isinstance(part, dict) and part.get("text") for part in turn]
        turn = "".join(texts) if all(isinstance(text, str) for text in texts) else ""
    return "" if turn is None else str(turn)
