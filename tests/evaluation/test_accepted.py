"""Acceptance lengths: by hand, and as the loops count them."""

import pytest

from nde_talf import Action, Delayed, LMDrafter, SamplingSetting, SpeculativeDecoder
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.loops import Speculative, transformers_loop
from nde_talf.evaluation.table import acceptance_by_position, histogram
from tests.decoding.pairs import tiny_pair


def test_counts_by_hand():
    records = [
        Record("T=1", "m", "a", "code", 7, 3, 15, 1.0, accepted={"0": 1, "2": 2}),
        Record("T=1", "m", "b", "code", 4, 2, 10, 1.0, accepted={"0": 1, "2": 1}),
    ]
    assert histogram(records) == [2, 0, 3]
    assert acceptance_by_position([2, 0, 3]) == [0.6, 0.6]
    assert histogram([Record("T=1", "m", "a", "code", 7, 3, 15, 1.0)]) == []  # not counted


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_counts_agree_with_tokens_and_passes(temperature):
    """A step commits what it accepts and one token more, in our loop and in transformers' own."""
    (target, draft), setting = tiny_pair(40), SamplingSetting(temperature)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), Delayed(Action(1, 0, 3)), "specinfer")
    for method in (
        Speculative("ours", decoder, setting, 40),
        transformers_loop("assisted", target, setting, 40, draft),
    ):
        record = method([1, 2, 3, 4], 0, "code")
        counts = histogram([record])
        accepted = sum(length * steps for length, steps in enumerate(counts))
        assert sum(counts) == record.steps and accepted == record.tokens - record.steps
        assert accepted <= record.nodes - record.steps and record.cpu_seconds > 0
