"""Dialogues: rows of a data set as conversations between a person and an assistant.

This module reads ShareGPT rows ("conversations"), chat rows ("messages"), lists of questions
("turns") and, with templates, sets of instructions. It knows roles and texts, but no tokenizers,
chat templates or models.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nde_talf.data.dialogues.settings import KEY, DialogueConfig
from nde_talf.data.text.corpus import load_table, short_hash
from nde_talf.data.text.recognise import DIALOGUES
from nde_talf.data.text.row_template import RowTemplate, text_of
from nde_talf.decoding.common.errors import UserError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = {"human": USER, "user": USER, "system": SYSTEM} | dict.fromkeys(
    ("gpt", "chatgpt", "model", "assistant"), ASSISTANT
)
"""Names of speakers in data sets -> their names in chat templates."""

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


class UnsuitedError(ValueError):
    """A dialogue that cannot be used.

    The message says why, to be put after a count: "3 without turns".
    """


def read_dialogues(config: DialogueConfig, seed: int) -> tuple[list[Dialogue], Counter[str]]:
    """Read the dialogues of `config.source` in random order.

    A dialogue ends with its last answer; with `config.regenerate` it holds no answers, and ends
    with its last question.

    Returns:
        The dialogues, and how many rows were skipped for each reason.

    Raises:
        UserError: the source cannot be read, has no such column, or no dialogue with an assistant's
            turn.
    """
    rows = load_table(str(config.source), config.split)
    turns_of = _turns_of(config, rows.column_names)
    dialogues: dict[str, Dialogue] = {}
    skipped: Counter[str] = Counter()
    for index in np.random.default_rng(seed).permutation(len(rows)):
        if len(dialogues) == config.count:
            break
        try:
            messages = in_order(turns_of(rows[int(index)]))
            answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
            if config.regenerate:
                messages = [message for message in messages if message["role"] != ASSISTANT]
            elif not answers:
                raise UnsuitedError("without an assistant's turn")
            else:
                messages = messages[: answers[-1] + 1]
        except UnsuitedError as error:
            skipped[str(error)] += 1
            continue
        name = short_hash(json.dumps(messages))
        skipped["said before"] += name in dialogues
        dialogues.setdefault(name, Dialogue(name, messages))
    if not dialogues:
        reasons = ", ".join(f"{count} {reason}" for reason, count in (+skipped).items())
        raise UserError(
            f"{KEY}.source={config.source}: no dialogue in it can be used"
            f" ({reasons or 'it has no rows'}). Choose a set of texts with answers, name their"
            f" column with {KEY}.column or {KEY}.user and {KEY}.assistant, or let the target answer"
            f" with {KEY}.regenerate=true."
        )
    return list(dialogues.values()), +skipped


def in_order(turns: Any) -> list[Message]:
    """Turn a data set's turns into messages.

    Turns are {"from", "value"} or {"role", "content"} each, or texts, which are all the user's. A
    content may be a list of parts of type "text"; images and tool calls have no text.
    Surrounding blanks are dropped, as most chat templates do. Raises UnsuitedError for unknown
    roles, turns without text, and anything but user and assistant in turn after at most one system
    message.
    """
    if not isinstance(turns, list) or not turns:
        raise UnsuitedError("without turns")
    if all(isinstance(turn, str) for turn in turns):
        return [_message({"role": USER, "content": text}) for text in turns]
    messages = [_message(turn) for turn in turns]
    roles = [message["role"] for message in messages]
    roles = roles[1:] if roles[0] == SYSTEM else roles
    if not roles or any(role != (USER, ASSISTANT)[i % 2] for i, role in enumerate(roles)):
        raise UnsuitedError("with roles out of order")
    return messages


def _message(turn: Any) -> Message:
    role = isinstance(turn, dict) and ROLES.get(str(turn.get("from", turn.get("role"))))
    if not role:
        raise UnsuitedError("with an unknown role")
    text = text_of(turn).strip()
    if not text:
        raise UnsuitedError("with a turn that has no text")
    return {"role": role, "content": text}


def _turns_of(config: DialogueConfig, columns: list[str]) -> Callable[[dict], Any]:
    """Return what gives a row's turns: its column of turns, or templates of question and answer."""
    if config.user:
        if not config.assistant and not config.regenerate:
            raise UserError(
                f"{KEY}.user is set, {KEY}.assistant is not: name the answers' columns, or set"
                f" {KEY}.regenerate=true."
            )
        texts = {USER: config.user, ASSISTANT: config.assistant}
        templates = {
            role: RowTemplate(text, str(config.source), f"{KEY}.{role}")
            for role, text in texts.items()
            if text
        }
        for template in templates.values():
            template.check(columns)
        return lambda row: [
            {"role": role, "content": template.render(row)} for role, template in templates.items()
        ]
    asked = [config.column] if config.column else DIALOGUES
    column = next((name for name in asked if name in columns), None)
    if column is None:
        raise UserError(
            f"{KEY}.source={config.source} has no column {' or '.join(asked)}; its columns are"
            f" {', '.join(columns)}. Set {KEY}.column to the list of turns, or {KEY}.user and"
            f" {KEY}.assistant to templates such as '{{question}}'."
        )
    return lambda row: row[column]
