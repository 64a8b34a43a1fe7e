"""Prompts cut from held-out documents."""

import pytest

from nde_talf.data.text.corpus import load_documents, split_documents
from nde_talf.data.text.prompts import prompts_from_documents
from nde_talf.data.text.tokenizer import train_tokenizer
from tests.refusal import refusal


@pytest.mark.slow
def test_prompts_have_a_length_in_the_range_and_occur_once_in_the_documents():
    held_out = split_documents(load_documents("stdlib"), 0.1, seed=0)[1]
    texts = held_out["text"][:]
    tokenizer = train_tokenizer(texts, 512)
    prompts = prompts_from_documents(held_out, 60, 0, tokenizer, (16, 64))
    for prompt in prompts:
        assert 16 <= len(tokenizer(prompt.text)["input_ids"]) <= 64
        assert any(prompt.text in text for text in texts)
        assert not prompt.text.endswith("\n")  # a token that a file ends with
    assert len({p.id for p in prompts}) == len(prompts) == 60
    most = max(range(len(texts)), key=lambda i: texts[i].count("def "))
    one = held_out.select([most])
    assert len(prompts_from_documents(one, 4, 0, tokenizer, (16, 64))) == 4
    with refusal(r"6 prompts .* yield 4"):
        prompts_from_documents(one, 6, 0, tokenizer, (16, 64))
    deep = one.map(lambda row: {"text": "+".join("1" * 5000)})  # Python cannot parse it
    with refusal("yield 0"):
        prompts_from_documents(deep, 1, 0, tokenizer, (16, 64))
