"""A text ends at the tokens of generation_config, of the tokenizer, and of the chat template."""

import json
import shutil
from pathlib import Path

import pytest

from nde_talf.data.text.pair import load_models
from nde_talf.data.text.templates import text_ends
from nde_talf.data.text.tokenizer import train_tokenizer
from tests.data.chat_templates import END_OF_TURN, FAMILIES, family_tokenizer

PAIR = Path(__file__).parents[1] / "fixtures/pair"
SHOWN = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}"


@pytest.mark.parametrize(
    "template, token",
    [
        (None, None),
        (SHOWN + "<end>{% endfor %}", "<end>"),
        (SHOWN + "\n<|end|>\n<end>{% endfor %}", "<|end|>"),  # two, as Phi-3 has them
        (SHOWN + "\n{% endfor %}", None),
        (SHOWN + " </turn> <end>{% endfor %}", None),  # words come first
        ("{{ raise_exception('no') }}", None),
        ("{{ messages[0].content }}<end>", None),  # answers are dropped
    ],
)
def test_the_token_after_an_answer(tmp_path, template, token):
    tokenizer = train_tokenizer(["ab"] * 9, 260)
    tokenizer.add_tokens(["<s>", "<end>", "<|end|>"], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    own = {tokenizer.eos_token_id}
    added = {tokenizer.convert_tokens_to_ids(token)} if token else set()
    assert text_ends(str(tmp_path), [-1], len(tokenizer)) == own | added
    assert text_ends(str(tmp_path), None, 1 + tokenizer.eos_token_id) == own  # no further rows


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_families(family, tmp_path):
    made = family_tokenizer(family, ["Hi, you."])
    made.eos_token = made.bos_token  # as tokenizers of base models name it
    made.save_pretrained(tmp_path)
    end = made.convert_tokens_to_ids(END_OF_TURN[family])
    assert text_ends(str(tmp_path), [1, 2], len(made)) == {1, 2, end, made.eos_token_id}


def test_a_target_is_loaded_with_the_ends_of_its_tokenizer_too(tmp_path):
    train_tokenizer(["ab"], 260).save_pretrained(tmp_path / "target")
    where = [str(tmp_path / role) for role in ("target", "draft")]
    for folder, eos in zip(where, ([-1, 7], [7, 9]), strict=True):
        shutil.copytree(PAIR / Path(folder).name, folder, dirs_exist_ok=True)
        Path(folder, "checksums.json").unlink()
        Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    target, draft = load_models(where, "cpu", "float32")
    assert target.ends == {0, 7} and draft.ends == {7, 9}
