"""Dialogues: which rows of a data set are conversations between a person and an assistant, and who
says what.

This module reads ShareGPT rows ("conversations"), chat rows ("messages"), lists of questions
("turns") and, with templates, sets of instructions. It knows roles and texts, but no tokenizers,
chat templates or models.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nde_talf.data.dialogues.settings import KEY, DialogueConfig
from nde_talf.data.text.corpus import load_table
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.decoding.common.errors import UserError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = {"human": USER, "user": USER, "system": SYSTEM} | dict.fromkeys(
    ("gpt", "chatgpt", "model", "assistant"), ASSISTANT
)
"""What data sets call who speaks -> what chat templates call them."""

COLUMNS = ("conversations", "conversation", "messages", "turns")
"""Where a row's turns may be, in this order of preference."""

Message = dict[str, str]
"""One turn: {"role": "system", "user" or "assistant", "content": text}."""


@dataclass(frozen=True)
class Dialogue:
    """A conversation.

    Attributes:
        name: hash of the messages.
        messages: perhaps one of the system, then the user and the assistant in turn, the user
            first.
        cut: the last answer is unfinished, so that nothing is learnt about its end.
    """

    name: str
    messages: list[Message]
    cut: bool = False


class OutOfOrderError(ValueError):
    """Turns that are no dialogue.

    The message says why, to be put after a count: "3 without turns".
    """


def read_dialogues(config: DialogueConfig, seed: int) -> tuple[list[Dialogue], Counter[str]]:
    """The dialogues of `config.source` in random order, and how many rows were skipped for each
    reason.

    A dialogue ends with its last answer; with `config.regenerate` it holds no answers, and ends
    with its last question.

    Raises:
        UserError: the source cannot be read, has no such column, or no dialogue with an assistant's
            turn.
    """
    rows = load_table(str(config.source), config.split)
    turns = (
        _instructions(config, rows.column_names)
        if config.user
        else _column(config, rows.column_names)
    )
    found: dict[str, Dialogue] = {}
    skipped: Counter[str] = Counter()
    for row in rows.shuffle(seed=seed):
        if config.count is not None and len(found) == config.count:
            break
        try:
            messages = in_order(turns(row))
            messages = (
                without_answers(messages) if config.regenerate else up_to_last_answer(messages)
            )
        except OutOfOrderError as error:
            skipped[str(error)] += 1
            continue
        name = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
        if name in found:
            skipped["said before"] += 1
        else:
            found[name] = Dialogue(name, messages)
    if not found:
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "it has no rows"
        )
        raise UserError(
            f"{KEY}.source={config.source}: there is no dialogue with an assistant's turn in it"
            f" ({reasons}). Choose a set with answers, name their column with {KEY}.column or"
            f" {KEY}.user and {KEY}.assistant, or let the target answer with {KEY}.regenerate=true."
        )
    return list(found.values()), skipped


def in_order(turns: Any) -> list[Message]:
    """Turns of a data set as messages: {"from", "value"} or {"role", "content"} each, or texts,
    which are all the user's.

    Surrounding blanks are dropped, as most chat templates do. Raises OutOfOrderError for unknown
    roles, turns without text, and anything but user and assistant in turn after at most one system
    message.
    """
    if not isinstance(turns, list) or not turns:
        raise OutOfOrderError("without turns")
    if all(isinstance(turn, str) for turn in turns):
        return [_message(USER, text) for text in turns]
    messages = []
    for turn in turns:
        role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        if role not in ROLES:
            raise OutOfOrderError("with an unknown role")
        messages.append(_message(ROLES[role], turn.get("value", turn.get("content"))))
    roles = [message["role"] for message in messages]
    roles = roles[1:] if roles[0] == SYSTEM else roles
    if not roles or any(role != (USER, ASSISTANT)[i % 2] for i, role in enumerate(roles)):
        raise OutOfOrderError("with roles out of order")
    return messages


def up_to_last_answer(messages: list[Message]) -> list[Message]:
    """`messages` up to the last answer, without the questions after it.

    Raises OutOfOrderError if nothing is answered.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not answers:
        raise OutOfOrderError("without an assistant's turn")
    return messages[: answers[-1] + 1]


def without_answers(messages: list[Message]) -> list[Message]:
    """`messages` without the assistant's."""
    return [message for message in messages if message["role"] != ASSISTANT]


def _message(role: str, text: Any) -> Message:
    if not isinstance(text, str) or not text.strip():
        raise OutOfOrderError("with a turn that has no text")
    return {"role": role, "content": text.strip()}


def _column(config: DialogueConfig, columns: Iterable[str]):
    """A function that gives a row's turns, from its column of turns."""
    wanted = [config.column] if config.column else COLUMNS
    column = next((name for name in wanted if name in columns), None)
    if column is None:
        raise UserError(
            f"{KEY}.source={config.source} has no column {' or '.join(wanted)}; its columns are"
            f" {', '.join(columns)}. Set {KEY}.column to the list of turns, or {KEY}.user and"
            f" {KEY}.assistant to templates such as '{{question}}'."
        )
    return lambda row: row[column]


def _instructions(config: DialogueConfig, columns: Iterable[str]):
    """A function that gives a row's turns, from the templates of a question and its answer."""
    if not config.assistant and not config.regenerate:
        raise UserError(
            f"{KEY}.user is set, {KEY}.assistant is not: name the answers' columns, or set"
            f" {KEY}.regenerate=true."
        )
    sides = {USER: config.user, **({ASSISTANT: config.assistant} if config.assistant else {})}
    templates = {
        role: RowTemplate(text, str(config.source), f"{KEY}.{role}") for role, text in sides.items()
    }
    for template in templates.values():
        template.check(list(columns))
    return lambda row: [
        {"role": role, "content": template.render(row)} for role, template in templates.items()
    ]
