"""Columns of somebody's own file that are known by their names."""

from nde_talf.data.text.rows import Rows
from nde_talf.decoding.common.errors import UserError

DIALOGUES = ("conversations", "conversation", "messages", "turns")
"""Columns that may hold a row's turns, in this order of preference."""
QUESTIONS = ("prompt", "question", "instruction", "problem", "query", "input", "text", "content")
"""Columns that may hold a prompt."""


def question_template(rows: Rows, source: str, key: str) -> str:
    """Return the template of a prompt over the columns of `rows`.

    Raises:
        UserError: none of the columns has a prompt's name, or several have.
    """
    columns = rows.column_names
    named = [name for name in QUESTIONS if name in columns]
    chosen = named or [name for name in DIALOGUES if name in columns][:1]
    if len(chosen) == 1:
        return f"{{{chosen[0]}}}"
    raise UserError(
        f"{source}: which column is the prompt? It has {', '.join(chosen or columns)}. Name it with"
        f" \"{key}='{{COLUMN}}'\"."
    )
