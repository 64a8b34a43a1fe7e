"""Acceptance lengths and vLLM's counters: by hand, and as the loop counts them."""

import pytest

from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.loops import Speculative, transformers_assisted
from nde_talf.evaluation.table import (
    acceptance_by_position,
    accepted_per_position,
    histogram,
    vllm_counters,
)
from tests.decoding.pairs import tiny_pair


def test_counts_by_hand():
    records = [
        Record("T=1", "m", "a", "code", 7, 3, 15, 1.0, accepted={"0": 1, "2": 2}),
        Record("T=1", "m", "b", "code", 4, 2, 10, 1.0, accepted={"0": 1, "2": 1}),
    ]
    assert histogram(records) == [2, 0, 3]
    assert accepted_per_position([2, 0, 3]) == [3, 3] and acceptance_by_position([2, 0, 3]) == [
        0.6,
        0.6,
    ]
    assert vllm_counters(records) == {
        "vllm:spec_decode_num_drafts": 5,
        "vllm:spec_decode_num_draft_tokens": 20,
        "vllm:spec_decode_num_accepted_tokens": 6,
        "vllm:spec_decode_num_accepted_tokens_per_pos": [3, 3],
    }
    assert histogram([Record("T=1", "m", "a", "code", 7, 3, 15, 1.0)]) == []  # of an older file


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_counters_agree_with_tokens_and_passes(temperature):
    """Block efficiency is vLLM's mean acceptance length, 1 + accepted / drafts, in our loop and in
    transformers' own.
    """
    (target, draft), setting = tiny_pair(40), SamplingSetting(temperature)
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(1, 0, 3)), VERIFIERS["specinfer"]
    )
    for method in (
        Speculative("ours", decoder, setting, 40),
        transformers_assisted("assisted", target, setting, 40, draft),
    ):
        record = method([1, 2, 3, 4], 0, "code")
        counters = vllm_counters([record])
        drafts, accepted = (
            counters[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens")
        )
        assert drafts == record.steps and 1 + accepted / drafts == pytest.approx(
            record.tokens / record.steps
        )
        assert sum(counters["vllm:spec_decode_num_accepted_tokens_per_pos"]) == accepted
        assert accepted <= counters["vllm:spec_decode_num_draft_tokens"]
        assert record.cpu_seconds > 0
