"""Rows of data sets as dialogues: the shapes they come in, what is skipped and counted, and what is
told.
"""

import json

from nde_talf.data.dialogues.read import read_dialogues
from nde_talf.data.dialogues.settings import DialogueConfig
from tests.refusal import refusal

SHAREGPT = [
    {"from": "human", "value": " Hi. "},
    {"from": "gpt", "value": "Hello!"},
    {"from": "human", "value": "Bye."},
]
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello!"},
]


def read(folder, rows, **config):
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_dialogues(DialogueConfig(source=str(source), **config), seed=0)


def test_rows_out_of_order_are_skipped_and_counted(tmp_path):
    said = (SHAREGPT, SHAREGPT[1:], SHAREGPT, SHAREGPT[2:])
    (one,), skipped = read(tmp_path, [{"conversations": turns} for turns in said])
    assert one.messages == [{"role": "user", "content": "Hi."}, MESSAGES[2]]
    assert skipped == {
        "with roles out of order": 1,
        "said before": 1,
        "without an assistant's turn": 1,
    }


def test_a_set_without_an_assistants_turn_is_an_error_unless_the_target_answers(tmp_path):
    rows = [{"turns": ["Hi.", "Bye."]}, {"turns": ["What?"]}]
    with refusal(r"2 without an assistant's turn.*dialogues\.regenerate=true"):
        read(tmp_path, rows)
    dialogues, _ = read(tmp_path, rows, regenerate=True)
    assert sorted(len(one.messages) for one in dialogues) == [1, 2]
    (one,), _ = read(tmp_path, [{"messages": MESSAGES}], regenerate=True)
    assert one.messages == MESSAGES[:2]


def test_columns_can_be_named(tmp_path):
    rows = [{"id": 1, "talk": SHAREGPT, "conversations": [], "question": "2 + 2?", "answer": "4"}]
    with refusal("without turns"):
        read(tmp_path, rows)
    (one,), _ = read(tmp_path, rows, column="talk")
    assert one.messages[1]["content"] == "Hello!"
    (one,), _ = read(tmp_path, rows, user="Q: {question}", assistant="{answer}")
    assert [message["content"] for message in one.messages] == ["Q: 2 + 2?", "4"]
    with refusal(r"dialogues\.user asks for the column 'ask'"):
        read(tmp_path, rows, user="{ask}", assistant="{answer}")
