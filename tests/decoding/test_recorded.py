"""What the loop records of committed tokens, and what a generation says of acceptance."""

import torch

from nde_talf import (
    Action,
    Delayed,
    Generation,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    Step,
)
from nde_talf.decoding.sampling.logits_processing import LogitsProcess
from tests.decoding.tiny_loop import DRAFT, PROMPT, TARGET


class InPlace(LogitsProcess):
    textless = True

    def __call__(self, texts, logits):
        return logits.mul_(0.5)


def test_log_probabilities_and_logits_are_those_of_a_plain_pass():
    texts = {}
    for record in ("logprobs", "logits", ""):
        policy = Delayed(Action(2, 1, 2))
        decoder = SpeculativeDecoder(
            TARGET, LMDrafter(DRAFT), policy, "specinfer", record=record, process=InPlace()
        )
        texts[record] = decoder.generate(PROMPT, 20, SamplingSetting(0.7, 0.9), Rng.seeded(3))
    with_logprobs = texts["logprobs"]
    assert texts["logits"].tokens == texts[""].tokens == with_logprobs.tokens
    assert not texts[""].recorded
    with torch.no_grad():
        logits = TARGET.module(torch.tensor([PROMPT + with_logprobs.tokens])).logits[
            0, len(PROMPT) - 1 : -1
        ]
    expected = logits.log_softmax(-1)[range(20), with_logprobs.tokens]
    torch.testing.assert_close(torch.tensor(with_logprobs.logprobs), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.stack(texts["logits"].recorded[:20]), logits, rtol=1e-4, atol=1e-4
    )
    assert len(with_logprobs.logprobs) == 20 and any(step.tau for step in with_logprobs.steps)


def test_acceptance_has_the_shape_of_vllms_metrics():
    steps = [Step([5, 6], 4, {}), Step([7, 8, 9, 1], 4, {}), Step([2], 3, {})]
    assert Generation(steps=steps).acceptance() == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 8,
        "acceptance_histogram": [1, 1, 0, 1],
        "acceptance_per_position": [2 / 3, 1 / 3, 1 / 3],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
    }
    empty = Generation().acceptance()
    assert empty["mean_acceptance_length"] == 1 and empty["acceptance_histogram"] == [0]
