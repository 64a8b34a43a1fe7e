"""A run's text as it comes, then what decoded it and how fast, for `nde generate`."""

from statistics import median

import torch
from rich.text import Text as Styled
from transformers import PreTrainedTokenizerBase

from nde_talf.data.text.shipped import SMALL
from nde_talf.data.text.templates import ChatTemplate, load_tokenizer
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.generation import Generation
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting
from nde_talf.decoding.threads import threads
from nde_talf.evaluation.sample_text import pieces
from nde_talf.evaluation.static_trees import PICKED
from nde_talf.pipelines.commands.generate import DecodingConfig, GenerateConfig
from nde_talf.pipelines.runs.decoder import make_decoder, plain_of
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.run_models import pair_of
from nde_talf.selector.policy import NeuralPolicy

WARM_UP = 8  # tokens decoded before the text that is shown
SHOWN = 3  # trees that a selector chose most often
PASSES = 3  # of each side of a comparison, in turn


@torch.inference_mode()
def stream(config: GenerateConfig, run: Run) -> None:
    """Decode, and print the text as it comes, then the figures."""
    with threads(config.model.threads):
        tokenizer = load_tokenizer(pair_of(run).where("target"))
        new_tokens, setting = config.new_tokens, config.setting
        text, prompt = prompt_of(config, run, tokenizer)
        longest = len(prompt) + new_tokens + MARGIN
        decoder = make_decoder(config, run, config.model.static_shapes * longest)
        tokens, stop = prompt, decoder.target.ends
        # Decoded once without counting, so that times are true.
        decoder.generate(prompt, min(WARM_UP, new_tokens), setting, Rng.seeded(config.seed))
        if isinstance(decoder.policy, NeuralPolicy):
            decoder.policy.counts.clear()
        stream = decoder.blocks(prompt, new_tokens, setting, Rng.seeded(config.seed), stop)
        console.print(Styled(text, style="dim"), end="")
        for block in stream:
            said = [token for token in block.tokens if token not in stop]
            for i, piece in enumerate(pieces(tokenizer, tokens, said)):
                style = "green" if i < block.accepted else "bold yellow"
                console.print(Styled(piece, style=style), end="")
            tokens = [*tokens, *block.tokens]
        console.print("\n")
        if len(stream.generation.tokens) < new_tokens and tokens[-1] not in stop:
            console.print(
                f"! the context of {decoder.max_context} tokens is full, so the text ends here."
            )
        compare = config.run == SMALL if config.compare is None else config.compare
        describe(decoder, config)
        console.print(statistics(stream.generation, compare))
        if compare:
            gain = compared(decoder, prompt, new_tokens, setting, config.seed)
            console.print(gain)


def prompt_of(
    config: GenerateConfig, run: Run, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[int]]:
    """Return the text to show, and the token ids to continue: in the chat template if there is one.

    A held-out prompt of the run is as it is evaluated: in a template already, or in none.
    """
    text = config.prompt
    if not text:
        held_out = pair_of(run).of_split("test")
        one = held_out[config.seed % len(held_out)]
        return one.text, one.tokens
    if config.chat and tokenizer.chat_template:
        turn = [{"role": "user", "content": text}]
        chat = ChatTemplate(tokenizer, "prompt").render(turn, add_generation_prompt=True)
        return f"{text}\n", tokenizer(chat, add_special_tokens=False)["input_ids"]
    return text, tokenizer(text)["input_ids"]


def compared(
    decoder: SpeculativeDecoder,
    prompt: list[int],
    new_tokens: int,
    setting: SamplingSetting,
    seed: int,
) -> str:
    """Compare the speed with and without a draft on one prompt, in words.

    Both run in turn with the same seeds, after one pass that warms up.
    """
    plain = plain_of(decoder)
    _, *pairs = (
        [
            each.generate(prompt, new_tokens, setting, Rng.seeded(number), decoder.target.ends)
            for each in (decoder, plain)
        ]
        for number in track(range(seed, seed + PASSES + 1), "comparing", PASSES + 1, "pair")
    )
    if not all(generation.steps for pair in pairs for generation in pair):
        return "compare=true needs more new tokens, or a text that does not end with its first."
    rates = [[each.decoded / each.decode_seconds for each in pair] for pair in pairs]
    ratios, (ours, theirs) = sorted(a / b for a, b in rates), map(median, zip(*rates, strict=True))
    text = (
        f"{median(ratios):.2f} times as fast as autoregressive decoding ({ratios[0]:.2f} to"
        f" {ratios[-1]:.2f} in {PASSES} pairs of passes over this prompt, in turn; {ours:.1f}"
        f" against {theirs:.1f} tokens/s, batch size 1, prefill left out)."
    )
    if ratios[0] < 1 < ratios[-1]:
        text += " That may be chance: is the machine busy? new_tokens=256 measures longer."
    if setting.temperature:
        return text
    if pairs[-1][0].tokens == pairs[-1][1].tokens:
        return f"{text} The two texts are equal."
    return f"{text} The two texts differ: nde check tells near ties from errors."


def describe(decoder: SpeculativeDecoder, config: DecodingConfig) -> None:
    """Print what decoded: policy and trees, rule, temperature, drafter and threads."""
    policy, drafting = decoder.policy, decoder.drafting
    kinds = {LMDrafter: "lm", NgramDrafter: "ngram"}
    drafter = kinds.get(type(drafting), "head")
    given = config.policy or drafter
    name = next((tree.title for tree in PICKED if tree.policy is policy), given)
    if isinstance(policy, NeuralPolicy):
        steps = sum(policy.counts.values())
        chosen = [
            f"{tuple(TREES[option])} in {count / steps:.0%} of the steps"
            for option, count in policy.counts.most_common(SHOWN)
        ]
        name = f"NDE selector, trees (K, L1, L2): {', '.join(chosen)}"
        if policy.static(config.setting) is not None:
            name += " (exported as a static tree here: choosing did not win)"
    elif isinstance(policy, Delayed):
        name = f"one tree at every step, (K, L1, L2) = {tuple(policy.action)}"
    rule, threads = getattr(decoder.verifier, "name", decoder.verifier), torch.get_num_threads()
    drafts = f"drafter {drafter}" if drafting else "no drafter"
    console.print(
        f"{name}; rule {rule}; T = {config.temperature:g}; {drafts}; {threads}"
        f" thread{'s' * (threads > 1)}",
        style="dim",
    )


def statistics(generation: Generation, compared: bool) -> str:
    """Format one line of figures of a generation.

    They are speed (unless it is `compared` after), tokens a target pass, tree size, fractions of
    the time, and memory.
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
    parts.append(f"peak {stats.peak_bytes / 1e6:.0f} MB")
    colours = " Green: accepted drafts; yellow: the target's own." if console.color_system else ""
    return "; ".join(parts) + "." + colours
