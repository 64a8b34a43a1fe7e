"""Dialogues: rows of a data set as conversations between a person and an assistant.

This module reads ShareGPT rows ("conversations"), chat rows ("messages"), lists of questions
("turns") and, with templates, sets of instructions. It depends on no tokenizer, chat template or
model.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nde_talf.data.dialogues.settings import KEY, DialogueConfig
from nde_talf.data.text.conversation import (
    ASSISTANT,
    DIALOGUES,
    USER,
    Message,
    UnsuitedError,
    in_order,
    with_system,
)
from nde_talf.data.text.corpus import load_table
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.decoding.common.checksums import short_hash
from nde_talf.decoding.common.errors import UserError


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
    turns_of, read = _turns_in(config, rows.column_names)
    dialogues: dict[str, Dialogue] = {}
    skipped: Counter[str] = Counter()
    for index in np.random.default_rng(seed).permutation(len(rows)):
        if len(dialogues) == config.count:
            break
        row = rows[int(index)]
        try:
            said = _as_asked(with_system(in_order(turns_of(row)), row, read), config.regenerate)
        except UnsuitedError as error:
            skipped[str(error)] += 1
            continue
        name = short_hash(json.dumps(said, default=str))
        skipped["said before"] += name in dialogues
        dialogues.setdefault(name, Dialogue(name, said))
    if not dialogues:
        reasons = ", ".join(f"{count} {reason}" for reason, count in (+skipped).items())
        raise UserError(
            f"{KEY}.source={config.source}: no dialogue in it can be used"
            f" ({reasons or 'it has no rows'}). Choose a set of texts with answers, name their"
            f" column with {KEY}.column or {KEY}.user and {KEY}.assistant, or let the target answer"
            f" with {KEY}.regenerate=true."
        )
    return list(dialogues.values()), +skipped


def _as_asked(said: list[Message], regenerate: bool) -> list[Message]:
    """Return a conversation up to its last answer; to `regenerate` answers, without these."""
    if regenerate:
        return [message for message in said if message["role"] != ASSISTANT]
    answers = [i for i, message in enumerate(said) if message["role"] == ASSISTANT]
    if not answers:
        raise UnsuitedError("without an assistant's turn")
    return said[: answers[-1] + 1]


def _turns_in(
    config: DialogueConfig, columns: list[str]
) -> tuple[Callable[[dict[str, Any]], Any], list[str]]:
    """Return what gives a row's turns, and the columns that it reads.

    It is a column of turns, or templates of question and answer.
    """
    if config.user:
        if not config.assistant and not config.regenerate:
            raise UserError(
                f"{KEY}.source={config.source}: the question is {config.user}; name the answer with"
                f" {KEY}.assistant, or set {KEY}.regenerate=true."
            )
        texts = {USER: config.user, ASSISTANT: config.assistant}
        templates = {
            role: RowTemplate(text, str(config.source), f"{KEY}.{role}")
            for role, text in texts.items()
            if text
        }
        for template in templates.values():
            template.check(columns)
        read = [name for template in templates.values() for name in template.columns]
        return lambda row: [
            {"role": role, "content": template.render(row)} for role, template in templates.items()
        ], read
    asked = [config.column] if config.column else DIALOGUES
    column = next((name for name in asked if name in columns), None)
    if column is None:
        raise UserError(
            f"{KEY}.source={config.source} has no column {' or '.join(asked)}; its columns are"
            f" {', '.join(columns)}. Set {KEY}.column to the list of turns, or {KEY}.user and"
            f" {KEY}.assistant to templates such as '{{question}}'."
        )
    return lambda row: row[column], [column]
