"""Two tokenizers make a pair where they have the same token at every id that both know."""

import pytest

from nde_talf.data.text.pair import check_tokenizers
from nde_talf.decoding.common.errors import UserError

TARGET = {"<s>": 0, "a": 1, "b": 2, "ab": 3, "</s>": 4, "<image>": 9}


def test_one_may_know_more_than_the_other():
    fewer = {token: index for token, index in TARGET.items() if index < 4}
    for one, other in ((TARGET, fewer), (fewer, TARGET), (TARGET, {**fewer, "<pad>": 7})):
        check_tokenizers(one, other, "small")


@pytest.mark.parametrize(
    "draft,words",
    [
        (
            {**TARGET, "<s>": 4, "</s>": 0},
            (
                "2 ids stand for other tokens (id 0 is '</s>' in the draft and '<s>' in the target;"
                " id 4"
            ),
        ),
        ({"z": 100}, "no id is known to both"),
    ],
)
def test_ids_that_differ_are_named_up_to_three(draft, words):
    with pytest.raises(UserError) as told:
        check_tokenizers(TARGET, draft, "small")
    assert words in str(told.value) and "model.draft=small" in str(told.value)
    assert str(told.value).count("in the draft and") <= 3
