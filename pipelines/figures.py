"""Figures of a streamed text in words: what decoded it, how fast, and how much faster.

`statistics` is of one generation, `compared` of several beside plain decoding.
"""

from statistics import median

import torch

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.ngram import statistics as matches
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.streams import Generation
from nde_talf.selector.policy import NeuralPolicy

SHOWN = 3  # trees that a selector chose most often
PASSES = 3  # of each side of a comparison, in turn


def compared(
    decoder: SpeculativeDecoder,
    prompt: list[int],
    new_tokens: int,
    setting: SamplingSetting,
    seed: int,
) -> str:
    """Compare the speed with and without a draft on one prompt, in words.

    Both run in turn with the same seeds, after one pass that warms up. The end-of-text token does
    not stop either, so that both decode as many tokens.
    """
    plain = SpeculativeDecoder(
        decoder.target, None, Autoregressive(), VERIFIERS["naive"], static=decoder.static
    )
    _, *pairs = (
        [
            each.generate(prompt, new_tokens, setting, Rng.seeded(number))
            for each in (decoder, plain)
        ]
        for number in range(seed, seed + PASSES + 1)
    )
    if not all(generation.steps for pair in pairs for generation in pair):
        return "compare=true needs more new tokens."
    rates = [[each.decoded / each.decode_seconds for each in pair] for pair in pairs]
    ratios, (ours, theirs) = sorted(a / b for a, b in rates), map(median, zip(*rates, strict=True))
    text = (
        f"{median(ratios):.2f} times as fast as autoregressive decoding ({ratios[0]:.2f} to"
        f" {ratios[-1]:.2f} in {PASSES} pairs of passes over this prompt, in turn; {ours:.0f}"
        f" against {theirs:.0f} tokens/s, batch size 1, prefill left out)."
    )
    if setting.temperature:
        return text
    if pairs[-1][0].tokens == pairs[-1][1].tokens:
        return f"{text} The two texts are equal."
    return f"{text} The two texts differ: see docs/decoding.md."


def described(
    decoder: SpeculativeDecoder, name: str, drafter: str, setting: SamplingSetting
) -> str:
    """Name what decoded: policy and trees, rule, temperature, drafter and threads."""
    policy = decoder.policy
    if isinstance(policy, NeuralPolicy):
        steps = sum(policy.counts.values())
        chosen = [
            f"{tuple(TREES[option % len(TREES)])} in {count / steps:.0%} of the steps"
            for option, count in policy.counts.most_common(SHOWN)
        ]
        others = len(policy.counts) - len(chosen)
        name = "NDE selector, trees (K, L1, L2): " + ", ".join(chosen)
        name += f", {others} others" if others else ""
    elif isinstance(policy, Delayed):
        name = f"one tree at every step, (K, L1, L2) = {tuple(policy.action)}"
    count, rule = torch.get_num_threads(), getattr(decoder.verifier, "name", decoder.verifier)
    drafts = f"drafter {drafter}" if decoder.drafting else "no drafter"
    return (
        f"{name}; rule {rule}; T = {setting.temperature:g}; {drafts};"
        f" {count} thread{'s' if count > 1 else ''}"
    )


def statistics(
    generation: Generation, drafter: Drafter | None = None, compared: bool = False
) -> str:
    """Format one line of figures of a generation.

    They are speed (unless it is `compared` after), tokens a target pass, tree size, fractions of
    the time, memory, and what n-grams drafted.
    """
    stats, decode = generation.stats, generation.decode_seconds
    parts = [f"{len(generation.tokens)} tokens, the first after {1e3 * stats.ttft:.0f} ms"]
    if generation.steps:
        phases = stats.seconds.items()
        if not compared:
            parts.append(f"{1 / stats.tpot:.0f} tokens/s ({1e3 * stats.tpot:.1f} ms a token)")
        parts += [
            f"{stats.block_efficiency:.2f} tokens a target pass",
            f"{stats.mean_nodes:.1f} nodes a tree",
            ", ".join(f"{phase} {100 * seconds / decode:.0f} %" for phase, seconds in phases),
        ]
    if sizes := matches(drafter):
        acceptances = ", ".join(
            f"{tested.accepted} of {tested.drafted} at {size}" for size, tested in sizes.items()
        )
        parts.append(f"n-grams accepted by tokens matched: {acceptances}")
    parts.append(f"peak {stats.peak_bytes / 1e6:.0f} MB")
    colours = " Green: accepted drafts; yellow: the target's own." if console.color_system else ""
    return "; ".join(parts) + "." + colours
