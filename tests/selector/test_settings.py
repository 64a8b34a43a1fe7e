"""The settings of selectors name what is wrong with them."""

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.selector.settings import SelectorConfig
from nde_talf.selector.train import cosine


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"verifiers": []}, r"selector\.verifiers=\[\]: List should have at least 1"),
        ({"verifiers": ["bv"]}, r"selector\.verifiers: bv verifies single paths.*use traversal"),
        ({"pricing": "eq12"}, r"selector\.pricing=eq12: there is none; choose from table, eq11"),
        ({"epochs": 0}, r"selector\.epochs=0: it should be greater than or equal to 1"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_key(values, words):
    with pytest.raises(UserError, match=words):
        SelectorConfig(**values)


def test_widths_follow_the_draft_up_to_the_papers():
    assert (
        SelectorConfig().widths(4096) == SelectorConfig().widths(512) == (128, (512, 32))
    )  # section 6, NDE paper
    assert SelectorConfig().widths(6) == SelectorConfig().widths(128) == (32, (128, 32))
    assert SelectorConfig(width=24).widths(4096) == (24, (96, 32))
    assert SelectorConfig(width=24, hidden=[7, 5]).widths(4096) == (24, (7, 5))


def test_the_learning_rate_falls_along_a_cosine():
    assert [cosine(step, 4) for step in range(5)] == pytest.approx(
        [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0]
    )
