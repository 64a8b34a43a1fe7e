"""Recognise what the columns of somebody's own file hold, by their names and first rows."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

from nde_talf.data.text.conversation import (
    LEFT_OUT,
    SYSTEM_COLUMNS,
    UNUSED,
    UnsuitedError,
    question,
)
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.rows import Rows
from nde_talf.decoding.common.errors import UserError

DIALOGUES = ("conversations", "conversation", "messages", "turns")
"""Columns that may hold a row's turns, in this order of preference."""
QUESTIONS = ("prompt", "question", "instruction", "problem", "query", "input", "text", "content")
"""Columns that may hold a prompt."""
ANSWERS = ("answer", "response", "output", "completion", "solution", "chosen")
"""Columns that may hold its answer."""
INSTRUCTION = {"instruction", "input"}
"""Columns that make a prompt together."""
LOOKED_AT = 100
"""Rows whose values tell which columns hold text."""


def question_template(rows: Sequence[Any], source: str, key: str) -> str:
    """Return the template of a prompt over the columns of `rows`.

    Raises:
        UserError: no column holds text, or several could be the prompt. The message lists them.
    """
    texts, lists = _columns(rows, str), _columns(rows, list)
    turns = [name for name in (*DIALOGUES, QUESTIONS[0]) if name in lists]
    named = [name for name in QUESTIONS if name in texts]
    if {*named} == INSTRUCTION:
        return "{instruction}\n{input}"
    nested = _columns(rows, dict)
    chosen = named or turns[:1] or _of_words(rows, texts, bool(nested))
    if len(chosen) == 1:
        return f"{{{chosen[0]}}}"
    if nested and not chosen:
        raise UserError(
            f"{source}: its texts lie inside {', '.join(nested)}. Write rows with a column prompt,"
            " or messages, beside the others."
        )
    if not texts:
        raise UserError(f"{source}: no column holds text; its columns are {_listed(rows, [])}.")
    several = chosen or texts
    raise UserError(
        f"{source}: which column is the prompt? It has {_listed(rows, several)}. Name it with"
        f" \"{key}='{{{several[0]}}}'\"."
    )


def answer_template(rows: Sequence[Any]) -> str | None:
    """Return the template of the answer, if one column has an answer's name."""
    named = [name for name in ANSWERS if name in _columns(rows, str)]
    return f"{{{named[0]}}}" if len(named) == 1 else None


def distinct(rows: Rows, template: RowTemplate) -> tuple[list[str], Counter[tuple[str, str]]]:
    """Return the prompts of rows, each once, and count what is left out or not used, see `told`.

    Raises UserError for a template that does not fit them.
    """
    template.check(rows.column_names)
    texts: dict[str, None] = {}
    notes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        try:
            asked = question(row, template)
        except UnsuitedError as error:
            notes[LEFT_OUT, str(error)] += 1
            continue
        notes[LEFT_OUT, "that occurred before"] += str(asked) in texts
        notes.update((UNUSED, each) for each in asked.unused)
        texts[str(asked)] = None
    return [*texts], +notes


def _columns(rows: Sequence[Any], kind: type) -> list[str]:
    """List the columns whose values are of `kind` where they are given, in the order of a row."""
    first = [*islice(rows, LOOKED_AT)]
    names = dict.fromkeys(name for row in first for name in row)
    given = {name: [row[name] for row in first if row.get(name) is not None] for name in names}
    return [
        name
        for name, values in given.items()
        if any(isinstance(value, kind) for value in values)
        and all(isinstance(value, (kind, int, float) if kind is str else kind) for value in values)
    ]


def _of_words(rows: Sequence[Any], texts: list[str], nested: bool) -> list[str]:
    """List the columns that may hold a prompt: no answers, and of several words if any are.

    nested: other columns hold more text, so columns of single words are taken for ids.
    """
    asked = [name for name in texts if name not in (*ANSWERS, *SYSTEM_COLUMNS)]
    several = [name for name in asked if " " in str(rows[0].get(name)).strip()]
    return several or ([] if nested else asked)


def _listed(rows: Sequence[Any], columns: list[str]) -> str:
    """List columns, each with the beginning of its first text and how many rows lack it."""
    first = [*islice(rows, LOOKED_AT)]
    parts = []
    for name in columns or first[0]:
        given = [row[name] for row in first if row.get(name) is not None]
        lack = f", missing in {len(first) - len(given)} of {len(first)} rows"
        begin = repr(str(given[0])[:40]) if given else "empty"
        parts.append(f"{name} ({begin}{lack * (len(given) < len(first))})")
    return ", ".join(parts)
