"""What the loop records of committed tokens, and what a generation says of acceptance."""

import torch

from nde_talf import (
    Action,
    Delayed,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
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
