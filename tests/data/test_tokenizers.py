"""Two tokenizers make a pair where they have the same token at every id of both; one makes
a pair with a model that has a row for the tokens of every text.
"""

import pytest

from nde_talf.data.text.pair import check_tokenizers
from nde_talf.data.text.shipped import shipped
from nde_talf.data.text.templates import check_ids, load_tokenizer
from nde_talf.decoding.common.errors import Advice
from tests.refusal import refusal

TARGET = {"<s>": 0, "a": 1, "b": 2, "ab": 3, "</s>": 4, "<image>": 9}


def test_ids_that_differ_are_named_up_to_three():
    moved = {token: (index + 1) % 5 for token, index in TARGET.items()}
    named = r"ids stand for other tokens \((id \d is '\S+' in the draft and '\S+' in the target(; |\))){3}"
    for draft, words in ((moved, named), ({"z": 100}, "no id is in both")):
        with refusal(f"small has another.*{words}"):
            check_tokenizers(TARGET, draft, "small")


def test_tokens_of_every_chat_without_a_row_are_refused_and_others_told():
    tokenizer = load_tokenizer(shipped("target"))
    rows = len(tokenizer)
    check_ids(tokenizer, rows, "here")
    tokenizer.add_tokens(["<|turn|>", "<|image|>"], special_tokens=True)
    with pytest.warns(Advice, match=rf"here: .* {rows} rows, and none for <\|turn\|> \({rows}\)"):
        check_ids(tokenizer, rows, "here")
    tokenizer.chat_template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    with refusal(r"here: .*which every text or chat holds"):
        check_ids(tokenizer, rows, "here")
    tokenizer.chat_template, tokenizer.eos_token = None, "<|image|>"
    with refusal(r"here: .*which every text or chat holds"):
        check_ids(tokenizer, rows, "here")
