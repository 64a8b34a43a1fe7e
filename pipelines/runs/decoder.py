"""The decoder of a run: what it is made of, its text as it comes, and its figures in words.

`nde_talf.pipelines.commands.generate` is the command; this module needs torch.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.text import Text as Styled
from transformers import PreTrainedTokenizerBase

from nde_talf.data.text.shipped import SMALL
from nde_talf.data.text.templates import ChatTemplate, load_tokenizer
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.generation import Generation
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import MARGIN, StaticShapes
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.recorded_step import SHAPES
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting
from nde_talf.decoding.threads import threads
from nde_talf.decoding.verifier import Verifier, check_compatible
from nde_talf.evaluation.protocol import GREEDY_TREE, HEAD_TREE
from nde_talf.evaluation.sample_text import pieces
from nde_talf.evaluation.static_trees import PICKED, picked
from nde_talf.pipelines.commands.generate import DecodingConfig, GenerateConfig
from nde_talf.pipelines.config.policies import default_verifier, make_policy
from nde_talf.pipelines.config.schema import TABLE
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.run_models import load_head_draft, pair_of
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.prices import LatencyTable

WARM_UP = 8  # tokens decoded before the text that is shown
SHOWN = 3  # trees that a selector chose most often
PASSES = 3  # of each side of a comparison, in turn


def open_run(
    run: str = SMALL, **settings: Any
) -> tuple[SpeculativeDecoder, PreTrainedTokenizerBase]:
    """Return the decoder of the shipped pair, or of a finished run, and the target's tokenizer.

    Args:
        run: "small", or the name of a run.
        settings: other keys of `nde generate`, such as drafter="head" or policy="dyspec".

    Raises:
        UserError: there is no such run, or it lacks what is asked for.
    """
    config = GenerateConfig(run=run, **settings)
    finished = Run(config.run, config.paths.checkpoints)
    tokenizer = load_tokenizer(pair_of(finished).where("target"))
    return make_decoder(config, finished, None), tokenizer


@torch.inference_mode()
def stream(config: GenerateConfig, run: Run) -> None:
    """Decode, and print the text as it comes, then the figures."""
    with threads(config.model.threads):
        tokenizer = load_tokenizer(pair_of(run).where("target"))
        new_tokens, setting = config.new_tokens, config.setting
        text, prompt = prompt_of(config, run, tokenizer)
        shapes = SHAPES[config.model.graphs](len(prompt) + new_tokens + MARGIN)
        decoder = make_decoder(config, run, shapes if config.model.static_shapes else None)
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
                console.print(Styled(piece, style=style), end="", soft_wrap=True)
            tokens = [*tokens, *block.tokens]
        console.print("\n")
        if len(stream.generation.tokens) < new_tokens and tokens[-1] not in stop:
            console.print(
                f"! the context of {decoder.max_context} tokens is full, so the text ends here."
            )
        compare = config.run == SMALL if config.compare is None else config.compare
        describe(decoder, config)
        console.print(statistics(stream.generation, decoder.drafting, compare), soft_wrap=True)
        if compare:
            gain = compared(decoder, prompt, new_tokens, setting, config.seed)
            console.print(gain, soft_wrap=True)


def prompt_of(
    config: GenerateConfig, run: Run, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[int]]:
    """Return the text to show, and the token ids to continue: in the chat template if there is one.

    A held-out prompt of the run is as it is evaluated: in a template already, or in none.
    """
    text = config.prompt
    if not text:
        held_out = [prompt for prompt in pair_of(run).every_prompt() if prompt.split == "test"]
        one = held_out[config.seed % len(held_out)]
        return one.text, one.tokens
    if config.chat and tokenizer.chat_template:
        turn = [{"role": "user", "content": text}]
        chat = ChatTemplate(tokenizer, "prompt").render(turn, add_generation_prompt=True)
        return f"{text}\n", tokenizer(chat, add_special_tokens=False)["input_ids"]
    return text, tokenizer(text)["input_ids"]


def make_decoder(
    config: DecodingConfig, run: Run, static: StaticShapes | None
) -> SpeculativeDecoder:
    """Load what the configuration asks for: models, policy, rule and drafter.

    Raises:
        UserError: the run has none of these, or they do not go together.
    """
    pair, placed, export = pair_of(run), config.model.placed, run.stage("draft") / "export"
    first = "head" if export.is_dir() else "ngram"
    if run.shipped and first == "ngram" and config.drafter is None:
        console.print(f"! no head ships in {export}: n-grams draft")
    asked = config.drafter or ("lm" if pair.has_draft else first)
    config = replace(config, drafter=asked)
    policy, rule = choose_policy(config, run)
    kind = None if policy.trees == "none" else asked
    _check_drafter(kind, config, policy, pair.has_draft, export)
    draft: Any = None
    console.quiet = True  # the text is all that is printed before the figures
    try:
        if kind == "lm":
            target, draft = pair.models(*placed)
        else:
            target = pair.target(*placed)
    finally:
        console.quiet = False
    if kind == "head":
        draft = load_head_draft(export, target, any_weights=run.shipped)
    drafter = _drafter(kind, draft, target, config, static)
    return SpeculativeDecoder(target, drafter, policy, rule, config.draft_temperature, static)


def _drafter(
    kind: str | None,
    draft: Any,
    target: CausalModel,
    config: DecodingConfig,
    static: StaticShapes | None,
) -> Drafter | None:
    if kind == "ngram":
        return NgramDrafter(target.vocab_size, config.ngram)
    if kind == "lm":
        return LMDrafter(draft, static)
    return draft.drafter(static) if kind else None


def choose_policy(config: DecodingConfig, run: Run) -> tuple[TreePolicy, Verifier]:
    """Return the policy asked for, and its verifier. Raises UserError for options it lacks."""
    policy, rule = _policy_and_rule(config, run)
    rule = VERIFIERS[config.verifier] if config.verifier else rule
    check_compatible(policy.trees, rule)  # before models are loaded
    return policy, rule


def _policy_and_rule(config: DecodingConfig, run: Run) -> tuple[TreePolicy, Verifier]:
    """Return the policy, and the rule that goes with it."""
    name: Any = config.policy
    selectors = run.selectors()
    # A run may have a selector for the verifier gbv, which is a policy's name too.
    if name in POLICIES and name not in selectors:
        rule = VERIFIERS[default_verifier(name, config.temperature)]
        return make_policy(name, config.options), rule
    if config.options:
        raise UserError(
            "options: they are those of a policy, such as policy=salf. A selector takes none, and"
            " those of drafter=ngram are the keys of ngram, such as ngram.nodes=8."
        )
    if not name and (chosen := _without_selector(config, run, selectors)):
        return chosen
    selector = Selector.from_pretrained(run.stage("selector") / "export" / (name or selectors[0]))
    table = selector.table or LatencyTable.load(run.stage("latency") / TABLE)
    policy = NeuralPolicy(selector, table)
    return policy, policy.verifier


def _without_selector(
    config: DecodingConfig, run: Run, selectors: list[str]
) -> tuple[TreePolicy, Verifier] | None:
    """Return policy and rule where none are named; None where the run has a selector for them.

    Beside a draft model the selectors choose its trees, and not the head's.
    """
    head = config.drafter == "head"
    if config.drafter == "ngram":
        return NgramTree(config.ngram), VERIFIERS["nss" if config.temperature else "greedy"]
    if not config.temperature:
        tuned = run.tuned("t0").get(HEAD_TREE if head else GREEDY_TREE)
        return picked(tuned), VERIFIERS["greedy"]
    if not selectors or (head and pair_of(run).has_draft):
        return Delayed(run.head_action(config.temperature)), VERIFIERS["traversal"]
    return None


def _check_drafter(
    kind: str | None, config: DecodingConfig, policy: TreePolicy, has_draft: bool, export: Path
) -> None:
    """Raise UserError where a run cannot draft as it is asked to."""
    if kind == "lm" and not has_draft:
        raise UserError(
            "drafter=lm: this run has no draft model. Use drafter=head, drafter=ngram, or"
            " policy=autoregressive."
        )
    if kind == "head" and not export.is_dir():
        raise UserError(
            f"drafter=head: {export} is not there; train a head with stage=draft, or use"
            f" drafter={'lm' if has_draft else 'ngram'}."
        )
    if kind == "ngram" and not isinstance(policy, NgramTree):
        raise UserError(
            f"policy={config.policy} with drafter=ngram: tokens of the text are picked, not drawn."
            " Leave policy out, or use drafter=lm."
        )


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


def plain_of(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """Return the autoregressive decoder of the same target."""
    return SpeculativeDecoder(
        decoder.target, None, Autoregressive(), "naive", static=decoder.static
    )


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
        soft_wrap=True,
    )


def statistics(generation: Generation, drafter: Drafter | None, compared: bool) -> str:
    """Format one line of figures of a generation.

    They are speed (unless it is `compared` after), tokens a target pass, tree size, fractions of
    the time, memory, and how often n-grams were accepted.
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
    if isinstance(drafter, NgramDrafter) and drafter.tested:
        sizes = sorted(drafter.tested.items())
        acceptances = ", ".join(f"{one.accepted} of {one.nodes} at {size}" for size, one in sizes)
        parts.append(f"n-grams accepted by tokens matched: {acceptances}")
    parts.append(f"peak {stats.peak_bytes / 1e6:.0f} MB")
    colours = " Green: accepted drafts; yellow: the target's own." if console.color_system else ""
    return "; ".join(parts) + "." + colours
