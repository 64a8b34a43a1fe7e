"""Conversations in the rows of data sets: their turns, system columns and tools.

Depends on no tokenizer, chat template or model.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nde_talf.data.text.row_template import RowTemplate, text_of

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = (
    dict.fromkeys(("human", USER), USER)
    | dict.fromkeys((SYSTEM, "developer"), SYSTEM)
    | dict.fromkeys(("gpt", "chatgpt", "model", ASSISTANT), ASSISTANT)
    | dict.fromkeys((TOOL, "function", "observation", "ipython"), TOOL)
)
"""Names of speakers in data sets -> their names in chat templates."""
AFTER = {SYSTEM: {USER}, USER: {ASSISTANT}, ASSISTANT: {USER, TOOL}, TOOL: {TOOL, ASSISTANT}}
"""Role -> the roles that may speak next."""
SYSTEM_COLUMNS, TOOL_COLUMN = (SYSTEM, "system_prompt"), "tools"
"""Columns beside the turns that are part of a conversation."""
TURN = ("from", "value", "role", "content")
"""Keys of a turn whose values are read; templates get the others as they are."""

Message = dict[str, Any]
"""One turn: {"role": one of the four, "content": text}, and perhaps tool_calls and the like."""


class UnsuitedError(ValueError):
    """A conversation that cannot be used.

    The message says why, to be put after a count: "3 without turns".
    """


@dataclass(frozen=True)
class Conversation:
    """Messages, and the tools that they may call."""

    messages: list[Message]
    tools: list[Any] | None = None

    def __str__(self) -> str:
        """Return the text of a lone turn; of several also who speaks."""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n".join(f"{m['role']}: {m['content']}" for m in self.messages)


def in_order(turns: Any) -> list[Message]:
    """Turn a data set's turns into messages of user and assistant in turn.

    The user is first, perhaps after one system message; tools speak between two turns of the
    assistant. Turns are {"from", "value"} or {"role", "content"} each, or texts, which are all the
    user's. A content may be a list of parts of type "text"; images have no text. Surrounding blanks
    are dropped, as most chat templates do. Raises UnsuitedError for anything else.
    """
    if not isinstance(turns, list) or not turns:
        raise UnsuitedError("without turns")
    if all(isinstance(turn, str) for turn in turns):
        return [_message({"role": USER, "content": turn}) for turn in turns]
    roles = [_role(turn) for turn in turns]
    if USER not in roles:
        raise UnsuitedError("without a user's turn")
    if roles[0] not in (SYSTEM, USER) or any(b not in AFTER[a] for a, b in pairwise(roles)):
        raise UnsuitedError("with roles out of order")
    return [_message(turn) for turn in turns]


def with_columns(messages: list[Message], row: dict[str, Any], read: Iterable[str]) -> Conversation:
    """Add the system turn and the tools in columns that are not `read`.

    A system turn among the messages wins over a column; tools are a list of objects.
    """
    for name in (each for each in SYSTEM_COLUMNS if each not in read):
        text = str(row.get(name) or "").strip()
        if text and messages[0]["role"] != SYSTEM:
            messages = [{"role": SYSTEM, "content": text}, *messages]
    tools = _parsed(row.get(TOOL_COLUMN)) or None
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        tools = None
    return Conversation(messages, tools)


def question(row: dict[str, Any], template: RowTemplate) -> Conversation:
    """Return what a row asks: a conversation up to its last question, or a template's text.

    A conversation ends before a question that follows another without an answer between them.
    Raises UnsuitedError for a row that asks nothing.
    """
    turns = row.get(template.column or "")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        asked = [at for at, turn in enumerate(turns) if _role(turn) == USER]
        twice = [at for at in asked if at + 1 in asked]
        last = [*twice, *asked[-1:], len(turns)][0]
        messages = in_order(turns[: last + 1])
        return with_columns(messages, row, template.columns)
    text = template.render(row).strip()
    if not text:
        raise UnsuitedError("that are blank")
    return with_columns([{"role": USER, "content": text}], row, template.columns)


def question_keys(messages: Sequence[Message]) -> list[str]:
    """Hash what a user asks, turn by turn: each question, and the first two, three ... together."""
    asked = [" ".join(m["content"].split()) for m in messages if m["role"] == USER]
    several = [asked[:end] for end in range(2, len(asked) + 1)]
    return [_digest(each) for each in ([[one] for one in asked] + several)]


def and_skipped(reasons: Counter[str]) -> str:
    """Tell how many rows or texts were left out, by reason.

    >>> and_skipped(Counter({"that are blank": 2}))
    '; skipped 2 that are blank'
    """
    return "".join(f"; skipped {count} {reason}" for reason, count in reasons.most_common())


def _digest(texts: list[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _role(turn: Any) -> str:
    role = isinstance(turn, dict) and ROLES.get(str(turn.get("from") or turn.get("role")))
    if not role:
        raise UnsuitedError("with an unknown role")
    return role


def _message(turn: dict[str, Any]) -> Message:
    others = {name: value for name, value in turn.items() if name not in TURN and value}
    calls = _parsed(others.get("tool_calls"))
    if isinstance(calls, list):
        others["tool_calls"] = [_call(each) for each in calls]
    text = text_of(turn).strip()
    if not text and not calls:
        raise UnsuitedError("with a turn that has no text")
    return {"role": _role(turn), "content": text} | others


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates take them."""
    if isinstance(call, dict):
        return {
            key: _call(_parsed(value) if key == "arguments" else value)
            for key, value in call.items()
        }
    return call


def _parsed(value: Any) -> Any:
    """Return what a text of JSON holds; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
