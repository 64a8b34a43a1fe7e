"""A text ends at the tokens of generation_config, of the tokenizer, and of the chat template."""

import json
import shutil
from pathlib import Path

import pytest

from nde_talf.data.text.pair import load_models
from nde_talf.data.text.templates import text_ends
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.end_tokens import end_tokens
from tests.data.chat_templates import END_OF_TURN, FAMILIES, family_tokenizer

PAIR = Path(__file__).parents[1] / "fixtures/pair"
TURN = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}END{% endfor %}"


@pytest.mark.parametrize(
    "eos, expected",
    [(None, ()), (3, (3,)), ([0, 5], (0, 5)), ((-1, 2), (2,)), ([7, 8, -100], (7,)), ([], ())],
)
def test_ids_of_a_generation_config(eos, expected):
    assert end_tokens(eos, 8).ids == {*expected}


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["ab"] * 9, 260)
    made.add_tokens(["<s>", "<end>", "<|end|>"], special_tokens=True)
    return made


@pytest.mark.parametrize(
    "template, token",
    [
        (None, None),
        (TURN.replace("END", "<end>"), "<end>"),
        (TURN.replace("END", "\n<|end|>\n<end>"), "<|end|>"),  # two, as Phi-3 has them
        (TURN.replace("END", "\n"), None),
        (TURN.replace("END", " </turn> <end>"), None),  # words come first
        ("{{ raise_exception('no') }}", None),
        ("{{ messages[0].content }}<end>", None),  # answers are dropped
        (TURN.replace("m.content", "m.content[0].text").replace("END", "<end>"), "<end>"),
        (TURN.replace("m.content", "m.content | upper").replace("END", "<end>"), None),
    ],
)
def test_the_token_after_an_answer(tokenizer, template, token):
    tokenizer.chat_template = template
    ends = text_ends(tokenizer, -1, len(tokenizer))
    assert ends.config == set() and ends.tokenizer == {tokenizer.eos_token_id}
    assert ends.template == ({tokenizer.convert_tokens_to_ids(token)} if token else set())
    few = text_ends(tokenizer, -1, 1 + tokenizer.eos_token_id)  # no rows for the tokens added
    assert few.ids == {tokenizer.eos_token_id}


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_families(family):
    made = family_tokenizer(family, ["Hi, you."])
    end = made.convert_tokens_to_ids(END_OF_TURN[family])
    made.eos_token = made.bos_token  # as tokenizers of base models name it
    assert text_ends(made, [1, 2], len(made)).ids == {1, 2, end, made.eos_token_id}


def test_models_are_loaded_with_the_ends_of_the_target_and_what_differs_is_told(tmp_path):
    train_tokenizer(["ab"], 260).save_pretrained(tmp_path / "target")
    for role, eos in (("target", [-1, 7]), ("draft", [7, 9])):
        shutil.copytree(PAIR / role, tmp_path / role, dirs_exist_ok=True)
        (tmp_path / role / "checksums.json").unlink(missing_ok=True)
        config = tmp_path / role / "generation_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": eos}))
    where = [str(tmp_path / role) for role in ("target", "draft")]
    with console.capture() as said:
        target, draft = load_models(where, "cpu", "float32")
    assert target.ends == {0, 7} and draft.ends == {7, 9}
    lines = [line for line in said.get().splitlines() if "end" in line]
    assert len(lines) == 2 and "target" in lines[0] and "draft" in lines[1]
    for file in (tmp_path / "target").glob("tokenizer*"):
        file.unlink()
    assert load_models(where[:1], "cpu", "float32")[0].ends == {7}
