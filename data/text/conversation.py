"""Conversations in the rows of data sets: their turns and system columns.

Depends on no tokenizer, chat template or model.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from nde_talf.data.text.row_template import RowTemplate, text_of
from nde_talf.decoding.common.checksums import short_hash

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (
    dict.fromkeys(("human", USER), USER)
    | dict.fromkeys((SYSTEM, "developer"), SYSTEM)
    | dict.fromkeys(("gpt", "chatgpt", "model", ASSISTANT), ASSISTANT)
)
"""Names of speakers in data sets -> their names in chat templates."""
AFTER = {SYSTEM: USER, USER: ASSISTANT, ASSISTANT: USER}
"""Role -> the role that speaks next."""
SYSTEM_COLUMNS = (SYSTEM, "system_prompt")
"""Columns beside the turns that hold a system turn."""
DIALOGUES = ("conversations", "conversation", "messages", "turns")
"""Columns that may hold a row's turns, in this order of preference."""
CALLS = "tool_calls"
"""Key of a turn that calls tools."""
TURN = ("from", "value", "role", "content")
"""Keys of a turn whose values are read; templates get the others as they are."""

Message = dict[str, Any]
"""One turn: {"role": one of the three, "content": text}, and perhaps thoughts and the like."""


class UnsuitedError(ValueError):
    """A conversation that cannot be used.

    The message says why, to be put after a count: "3 without turns".
    """


def shown(messages: Sequence[Message]) -> str:
    """Return the text of a lone turn; of several also who speaks."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


def in_order(turns: Any) -> list[Message]:
    """Turn a data set's turns into messages of user and assistant in turn.

    The user is first, perhaps after one system message. Turns are {"from", "value"} or {"role",
    "content"} each, or texts, which are all the user's. A content may be a list of parts of type
    "text"; images have no text. Surrounding blanks are dropped, as most chat templates do. Raises
    UnsuitedError for anything else, such as a call of a tool.
    """
    if not isinstance(turns, list) or not turns:
        raise UnsuitedError("without turns")
    if all(isinstance(turn, str) for turn in turns):
        return [_message({"role": USER, "content": turn}) for turn in turns]
    roles = [_role(turn) for turn in turns]
    if USER not in roles:
        raise UnsuitedError("without a user's turn")
    if roles[0] not in (SYSTEM, USER) or any(b != AFTER[a] for a, b in pairwise(roles)):
        raise UnsuitedError("with roles out of order")
    return [_message(turn) for turn in turns]


def with_system(messages: list[Message], row: dict[str, Any], read: Iterable[str]) -> list[Message]:
    """Add the system turn in a column that is not `read`, unless the messages begin with one."""
    for name in (each for each in SYSTEM_COLUMNS if each not in read):
        text = str(row.get(name) or "").strip()
        if text and messages[0]["role"] != SYSTEM:
            messages = [{"role": SYSTEM, "content": text}, *messages]
    return messages


def question(row: dict[str, Any], template: RowTemplate) -> list[Message]:
    """Return what a row asks: a conversation up to its last question, or a template's text.

    A conversation ends before a question that follows another without an answer between them.
    Raises UnsuitedError for a row that asks nothing.
    """
    turns = row.get(template.column or "")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        asked = [at for at, turn in enumerate(turns) if _role(turn) == USER]
        twice = [at for at in asked if at + 1 in asked]
        last = [*twice, *asked[-1:], len(turns)][0]
        return with_system(in_order(turns[: last + 1]), row, template.columns)
    text = template.render(row).strip()
    if not text:
        raise UnsuitedError("that are blank")
    return with_system([{"role": USER, "content": text}], row, template.columns)


def question_keys(messages: Sequence[Message]) -> list[str]:
    """Hash what a user asks, turn by turn: each question, and the first two, three ... together."""
    asked = [" ".join(m["content"].split()) for m in messages if m["role"] == USER]
    several = [asked[:end] for end in range(2, len(asked) + 1)]
    return [short_hash(json.dumps(each)) for each in ([[one] for one in asked] + several)]


def and_skipped(reasons: Counter[str]) -> str:
    """Tell how many rows or texts were left out, by reason.

    >>> and_skipped(Counter({"that are blank": 2}))
    '; skipped 2 that are blank'
    """
    return "".join(f"; skipped {count} {reason}" for reason, count in reasons.most_common())


def _role(turn: Any) -> str:
    role = isinstance(turn, dict) and ROLES.get(str(turn.get("from") or turn.get("role")))
    if not role:
        raise UnsuitedError("with an unknown role")
    return role


def _message(turn: dict[str, Any]) -> Message:
    others = {name: value for name, value in turn.items() if name not in TURN and value}
    if CALLS in others:
        raise UnsuitedError("with a tool call")
    text = text_of(turn).strip()
    if not text:
        raise UnsuitedError("with a turn that has no text")
    return {"role": _role(turn), "content": text} | others
