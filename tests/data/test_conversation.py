"""Conversations of rows: what is asked, by whom and with which tools."""

import pytest

from nde_talf.data.text.conversation import (
    in_order,
    question,
    question_keys,
    with_columns,
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
        ({"messages": [*ONE[1:3], *chat("tool: x", "assistant: 2")]}, ONE[1:2]),
        ({"messages": chat("developer: Be kind.", "human: One?")}, ONE[:2]),
    ],
)
def test_a_prompt_is_the_conversation_up_to_its_last_question(row, shown):
    assert asked(row).messages == shown


def test_tools_may_be_texts_of_json_and_arguments_are_objects():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [ONE[1], {"role": "assistant", "content": None, "tool_calls": [call], "id": None}]
    messages = in_order([*turns, {"from": "observation", "value": "x"}])
    made = with_columns(messages, {"tools": '[{"name": "f"}]'}, [])
    assert made.tools == [{"name": "f"}] and [m["role"] for m in messages][2] == "tool"
    called = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [called]}


def test_a_question_is_known_by_all_of_it_alone_and_after_those_before():
    (one,), keys = question_keys(ONE[1:2]), question_keys(ONE)
    assert keys[0] == one and len({*keys}) == 3
    assert question_keys(chat("user:  One?\r\n")) == [one] != question_keys(chat("user: One"))
    template = RowTemplate("Q: {a} A:\n", "", "")
    assert template.bare(template.render({"a": "One? A:"}).strip()) == "One? A:"
