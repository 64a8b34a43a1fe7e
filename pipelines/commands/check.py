"""Prove on one's own pair that speculative and plain decoding agree: `nde check run=NAME`.

Greedy texts are compared with plain decoding's, token for token. Sampled texts are tested against
the target: the probability that it gives to the tokens before each token, in an order that is fixed
without looking at it, is uniform and independent if the text follows the target's law. So Pearson's
chi-square compares its tenths. The order begins with what the draft overrates most, since that is
where a faulty rule shows.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from pydantic import Field

from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import settings
from nde_talf.decoding.setting import SamplingSetting
from nde_talf.pipelines.commands.generate import GenerateConfig
from nde_talf.pipelines.commands.machine import threads
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.runs.finished import Run

if TYPE_CHECKING:
    from nde_talf.decoding.loop import SpeculativeDecoder

BINS = 10
SHORTEST, FEWEST = 4, 100
"""Tokens of a text, and of all texts together, that a check needs at least."""
ROUNDING = (
    " In {dtype} a pass over a tree rounds otherwise than one over a token. That may turn a token"
    " whose logit is within {margin:.0%} of the best, which is no fault of the rule;"
    " model.dtype=float32 shows the rule alone."
)


@settings()
class CheckConfig(GenerateConfig):
    """The keys of `nde generate`, and how many texts are compared."""

    texts: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Texts that are sampled, after held-out prompts of the run; an eighth as many are greedy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature or self.prompt or self.compare or self.model.target:
            raise UserError(
                "temperature=0, prompt, compare, model.target: leave them out. Greedy texts are"
                " always compared, and all texts follow the run's held-out prompts."
            )
        if self.new_tokens < SHORTEST or self.texts * self.new_tokens < FEWEST:
            raise UserError(
                f"texts={self.texts} new_tokens={self.new_tokens}: that is too little to find a"
                f" bias by. Give texts of {SHORTEST} tokens or more, and {FEWEST} tokens in all."
            )


def check(config: CheckConfig) -> None:
    """Print what agrees. Exits with status 1 where something does not."""
    run = Run(config.run, config.paths.checkpoints)
    check_device(config.model.device)
    quiet()
    import torch

    from nde_talf.data.text.pair import check_prompts
    from nde_talf.decoding.static import MARGIN, StaticShapes
    from nde_talf.pipelines.runs.decoder import describe, make_decoder

    with threads(config.model.threads), torch.inference_mode():
        held_out = [prompt for prompt in run.pair.every_prompt() if prompt.split == "test"]
        prompts = [prompt.tokens for prompt in held_out]
        room = config.new_tokens + MARGIN
        shapes = StaticShapes(max(map(len, prompts)) + room)
        decoder = make_decoder(config, run, shapes if config.model.static_shapes else None)
        check_prompts(held_out, decoder.target, room, decoder.max_context)
        prompts = [prompts[i % len(prompts)] for i in range(config.texts)]
        results = [
            greedy(decoder, prompts[: -(-config.texts // 8)], config.new_tokens),
            sampled(decoder, prompts, config.new_tokens, config.setting, config.seed),
        ]
        describe(decoder, config)
    for _, sentence in results:
        console.print(sentence, soft_wrap=True, highlight=False)
    if not all(passed for passed, _ in results):
        sys.exit(1)


def greedy(
    decoder: "SpeculativeDecoder", prompts: Sequence[list[int]], new_tokens: int
) -> tuple[bool, str]:
    """Compare greedy texts with plain decoding's; with a sentence."""
    from nde_talf.decoding.fitness import HALF, SAME
    from nde_talf.decoding.sampling import Rng
    from nde_talf.evaluation.lossless import first_difference
    from nde_talf.pipelines.runs.decoder import plain_of

    target, plain = decoder.target, plain_of(decoder)
    margin, margins = SAME.get(target.dtype, HALF), []
    for prompt in prompts:
        ours, theirs = (
            each.generate(
                prompt, new_tokens, SamplingSetting(0.0), Rng.seeded(0), target.ends
            ).tokens
            for each in (decoder, plain)
        )
        if ours != theirs:
            differ = first_difference(target, prompt, ours)
            margins.append(math.inf if differ is None else differ)  # ours ends, and should not
    others = sum(each > margin for each in margins)
    sentence = (
        f"Greedy: {len(prompts) - len(margins)} of {len(prompts)} texts of up to {new_tokens}"
        f" tokens equal plain decoding's, token for token; {len(margins) - others} part where the"
        f" two best logits are equal to {margin:g} of the largest, {others or 'none'} elsewhere."
    )
    if margin == HALF:
        sentence += ROUNDING.format(dtype=str(target.dtype).removeprefix("torch."), margin=margin)
    return not others, sentence


def sampled(
    decoder: "SpeculativeDecoder",
    prompts: Sequence[list[int]],
    new_tokens: int,
    setting: SamplingSetting,
    seed: int,
) -> tuple[bool, str]:
    """Test sampled texts against the target's law; with a sentence."""
    import torch

    from nde_talf.decoding.drafter import LMDrafter
    from nde_talf.decoding.sampling import Rng, warp
    from nde_talf.evaluation.chi_square import LEVEL, p_value, smallest_bias

    counts: Counter[int] = Counter()
    generator = torch.Generator().manual_seed(seed)
    for number, prompt in enumerate(prompts):
        rng = Rng.seeded(seed + number)
        tokens = decoder.generate(prompt, new_tokens, setting, rng, decoder.target.ends).tokens
        text = torch.tensor([[*prompt, *tokens]], device=decoder.target.device)
        after = slice(len(prompt) - 1, -1)
        law = order = warp(decoder.target.module(text).logits[0, after].double(), setting)
        if isinstance(decoder.drafter, LMDrafter):
            model, at = decoder.drafter.model, torch.arange(text.shape[1], device=text.device)
            logits = model.logits(model.hidden(text, at[None], None, None))[0, after]
            order = (warp(logits.double(), setting) / law).nan_to_num()
        level = order.gather(-1, text[0, len(prompt) :, None])
        before, beside = ((law * part).sum(-1).cpu() for part in (order > level, order == level))
        places = before + beside * torch.rand(len(tokens), generator=generator)
        counts.update((BINS * places).long().clamp(max=BINS - 1).tolist())
    total, uniform = counts.total(), dict.fromkeys(range(BINS), 1 / BINS)
    p = p_value(counts, uniform)
    passed = p > LEVEL
    return passed, (
        f"Sampled: {total} tokens of {len(prompts)} texts at {setting}"
        f" {'follow' if passed else 'DO NOT FOLLOW'} the target's law by one plain pass over each"
        f" (chi-square of {BINS} bins: p = {p:.2g}, an alarm at {LEVEL:g}); a bias that moves"
        f" {smallest_bias(total, uniform):.1%} of the probability between them is found in 99 of"
        " 100 runs."
    )


def main() -> None:
    """The command `nde check`."""
    launch("check", CheckConfig, check)


if __name__ == "__main__":
    main()
