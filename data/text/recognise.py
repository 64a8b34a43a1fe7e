"""Recognise what the columns of somebody's own file hold, by their names."""

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


def question_template(rows: Rows, source: str, key: str) -> str:
    """Return the template of a prompt over the columns of `rows`.

    Raises:
        UserError: none of several columns has a prompt's name, or several have. The message lists
            them.
    """
    columns = rows.column_names
    named = [name for name in QUESTIONS if name in columns]
    if {*named} == INSTRUCTION:
        return "{instruction}\n{input}"
    chosen = named or [name for name in DIALOGUES if name in columns][:1]
    chosen = chosen or columns * (len(columns) == 1)
    if len(chosen) == 1:
        return f"{{{chosen[0]}}}"
    first = rows[0] if len(rows) else {}
    likely = max(chosen or columns, key=lambda name: len(str(first.get(name))))
    listed = ", ".join(f"{name} ({str(first.get(name))[:40]!r})" for name in chosen or columns)
    raise UserError(
        f"{source}: which column is the prompt? It has {listed}. Name it with"
        f" \"{key}='{{{likely}}}'\"."
    )


def answer_template(rows: Rows) -> str | None:
    """Return the template of the answer, if one column has an answer's name."""
    named = [name for name in ANSWERS if name in rows.column_names]
    return f"{{{named[0]}}}" if len(named) == 1 else None
