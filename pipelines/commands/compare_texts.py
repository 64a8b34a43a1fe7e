"""Compare a run's texts with plain decoding, for `nde check`.

Greedy texts are compared with plain decoding's, token for token. Sampled texts are tested against
the target: the probability that it gives to the tokens before each token, in an order that is fixed
without looking at it, is uniform and independent if the text follows the target's law. So Pearson's
chi-square compares its tenths. The order begins with what the draft overrates most, since that is
where a faulty rule shows.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from nde_talf.data.text.pair import check_prompts
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.choose_forward import HALF, SAME
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.decoding.sampling.rng import Rng, warp
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting
from nde_talf.decoding.threads import threads
from nde_talf.evaluation.chi_square import LEVEL, p_value, smallest_bias
from nde_talf.pipelines.commands.check import CheckConfig
from nde_talf.pipelines.commands.stream import describe
from nde_talf.pipelines.runs.decoder import make_decoder, plain_of
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.run_models import pair_of

BINS = 10
ROUNDING = (
    " In {dtype} a pass over a tree rounds otherwise than one over a token. That may turn a token"
    " whose logit is within {margin:.0%} of the best, which is no fault of the rule;"
    " model.dtype=float32 shows the rule alone."
)


def compare_texts(config: CheckConfig, run: Run) -> list[tuple[bool, str]]:
    """Compare greedy and sampled texts: whether each agrees, with a sentence."""
    with threads(config.model.threads), torch.inference_mode():
        held_out = pair_of(run).of_split("test")
        prompts = [prompt.tokens for prompt in held_out]
        room = config.new_tokens + MARGIN
        longest = max(map(len, prompts)) + room
        decoder = make_decoder(config, run, config.model.static_shapes * longest)
        check_prompts(held_out, room, decoder.target, decoder)
        prompts = [prompts[i % len(prompts)] for i in range(config.texts)]
        results = [
            greedy(decoder, prompts[: -(-config.texts // 8)], config.new_tokens),
            sampled(decoder, prompts, config.new_tokens, config.setting, config.seed),
        ]
        describe(decoder, config)
    return results


def greedy(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[bool, str]:
    """Compare greedy texts with plain decoding's; with a sentence."""
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


@torch.inference_mode()
def first_difference(model: Model, prompt: list[int], text: list[int]) -> float | None:
    """Return the margin of the best logit over the first token that is not greedy.

    As a fraction of the largest logit's size; None if all tokens are greedy.
    """
    ids = torch.tensor([[*prompt, *text]], device=model.device)
    logits = model.module(ids).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(logits, text, strict=True):
        if int(row.argmax()) != token:
            return float((row.max() - row[token]) / row.abs().max())
    return None


def sampled(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    new_tokens: int,
    setting: SamplingSetting,
    seed: int,
) -> tuple[bool, str]:
    """Test sampled texts against the target's law; with a sentence."""
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
