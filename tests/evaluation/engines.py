"""Engines for the tester: one that samples from the target, and some that do what faulty engines
do.
"""

import torch

from nde_talf import CausalModel
from nde_talf.decoding.sampling.rng import warp


def engine(distort):
    """Samples all prompts at once from the target's distributions, which `distort(rows, logits,
    drawn)` changes; drawn: [n, k], the tokens before.
    """

    def opened(target, draft):
        model = CausalModel.load(target)

        @torch.inference_mode()
        def sample(prompts, new_tokens, setting, seed):
            generator, text = torch.Generator().manual_seed(seed), torch.tensor(prompts)
            for _ in range(new_tokens):
                logits = model.module(text).logits[:, -1]
                rows = distort(warp(logits, setting), logits, text[:, len(prompts[0]) :])
                drawn = (
                    torch.multinomial(rows, 1, generator=generator)
                    if setting.temperature
                    else rows.argmax(-1, keepdim=True)
                )
                text = torch.cat([text, drawn], -1)
            return text[:, len(prompts[0]) :].tolist()

        return sample

    return opened


honest = engine(lambda rows, logits, drawn: rows)
# The temperature is lost after the first token, as in vLLM's CPU build.
unwarped = engine(lambda rows, logits, drawn: logits.softmax(-1) if drawn.shape[1] else rows)


def _repeats(rows, logits, drawn):
    """A draft's token is accepted once too often."""
    if drawn.shape[1] != 1:
        return rows
    once = torch.nn.functional.one_hot(drawn[:, 0], rows.shape[1])
    return 0.5 * rows + 0.5 * once


repeating = engine(_repeats)


def short(target, draft):
    return lambda prompts, new_tokens, setting, seed: [[0] for _ in prompts]
