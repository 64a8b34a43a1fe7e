"""Conversations of rows: what is asked, and by whom."""

import pytest

from nde_talf.data.text.conversation import (
    UnsuitedError,
    in_order,
    question,
    question_keys,
)
from nde_talf.data.text.row_template import RowTemplate


def asked(row, template="{messages}"):
    return question(row, RowTemplate(template, "", ""))


def chat(*texts):
    """Turns such as "user: Hi."."""
    return [{"role": (parts := text.split(": "))[0], "content": parts[1]} for text in texts]


ONE = chat("system: Be kind.", "user: One?", "assistant: 1", "user: Two?")


@pytest.mark.parametrize(
    "row,shown",
    [
        ({"messages": [*ONE, *chat("assistant: ")]}, ONE),
        ({"messages": ONE[1:2], "system": "Be kind."}, ONE[:2]),
        ({"messages": ONE[:2], "system_prompt": "Be odd."}, ONE[:2]),
        ({"messages": [*ONE[1:], ONE[1]]}, ONE[1:]),
        ({"messages": ["One?", "Two?"]}, ONE[1:2]),
        ({"messages": [*ONE[1:2], *chat("assistant: 2")]}, ONE[1:2]),
        ({"messages": chat("developer: Be kind.", "human: One?")}, ONE[:2]),
    ],
)
def test_a_prompt_is_the_conversation_up_to_its_last_question(row, shown):
    assert asked(row) == shown


@pytest.mark.parametrize(
    "turns,words",
    [
        ([*ONE[1:3], {"role": "user", "content": "x", "tool_calls": [{}]}], "with a tool call"),
        ([*ONE[1:3], {"from": "observation", "value": "x"}], "with an unknown role"),
        (ONE[:1] * 2 + ONE[1:], "out of order"),
    ],
)
def test_conversations_with_tools_or_out_of_order_are_unsuited(turns, words):
    with pytest.raises(UnsuitedError, match=words):
        in_order(turns)


def test_a_question_is_known_by_all_of_it_alone_and_after_those_before():
    (one,), keys = question_keys(ONE[1:2]), question_keys(ONE)
    assert keys[0] == one and len({*keys}) == 3
    assert question_keys(chat("user:  One?\r\n")) == [one] != question_keys(chat("user: One"))
    template = RowTemplate("Q: {a} A:\n", "", "")
    assert template.bare(template.render({"a": "One? A:"}).strip()) == "One? A:"
