import pytest

from nde_talf.data.text.corpus import load_documents, split_documents
from nde_talf.data.text.prompts import prompts_from_documents
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.decoding.common.errors import UserError


@pytest.fixture(scope="module")
def held_out():
    return split_documents(load_documents("stdlib"), 0.1, seed=0)[1]


@pytest.fixture(scope="module")
def tokenizer(held_out):
    return train_tokenizer(held_out["text"], 512)


@pytest.fixture(scope="module")
def prompts(held_out, tokenizer):
    return prompts_from_documents(held_out, 60, 0, tokenizer, (16, 64))


@pytest.mark.slow
def test_every_prompt_has_a_length_in_the_range_and_occurs_once_in_the_documents(
    prompts, tokenizer, held_out
):
    for prompt in prompts:
        assert 16 <= len(tokenizer(prompt.text)["input_ids"]) <= 64
        assert any(prompt.text in text for text in held_out["text"])
    assert (
        len({prompt.text for prompt in prompts})
        == len({prompt.id for prompt in prompts})
        == len(prompts)
    )


def test_no_document_gives_more_than_four_prompts(held_out, tokenizer):
    one = held_out.select(
        [max(range(len(held_out)), key=lambda i: held_out[i]["text"].count("def "))]
    )
    assert len(prompts_from_documents(one, 4, 0, tokenizer, (16, 64))) == 4
    with pytest.raises(UserError, match=r"6 prompts .* yield 4"):
        prompts_from_documents(one, 6, 0, tokenizer, (16, 64))
