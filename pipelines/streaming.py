"""Generate with the settings of `nde_talf.pipelines.generate`.

A finished run's models, selector and head decode, and the text is printed as it comes.
"""

from statistics import median
from typing import TYPE_CHECKING

import torch
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nde_talf.data.text.pair import Pair
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.drafter import Drafter, LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.mixed import Mixed, MixedDrafter
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.ngram import NgramDrafter
from nde_talf.decoding.ngram import statistics as matches
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.setting import SamplingSetting
from nde_talf.decoding.static import MARGIN, StaticShapes
from nde_talf.decoding.stats import Generation
from nde_talf.decoding.verifier import Verifier, verifier
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation.sample import pieces
from nde_talf.pipelines.config import TABLE
from nde_talf.pipelines.drafted import load_head_draft
from nde_talf.pipelines.finished import Run
from nde_talf.pipelines.machine import threads
from nde_talf.pipelines.policy_table import default_verifier, make_policy
from nde_talf.selector.fingerprint import fingerprint, same_model
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy

if TYPE_CHECKING:
    from nde_talf.pipelines.generate import GenerateConfig

PASSES = 3  # of each side of a comparison, in turn
WARM_UP = 8  # tokens decoded before the text that is shown


def choose_policy(config: "GenerateConfig", run: Run) -> tuple[TreePolicy, Verifier]:
    """The policy asked for, and its verifier, with n-grams beside it where they are.

    Raises UserError for an unknown one.
    """
    if config.drafter == "ngram" and config.policy is None:
        if config.options:
            raise UserError(
                "options: those of drafter=ngram are the keys of ngram, such as ngram.nodes=8."
            )
        name = config.verifier or ("nss" if config.temperature else "greedy")
        return NgramTree(config.ngram), verifier(name)
    policy, rule = _policy_of_draft(config, run, config.drafter.removeprefix("ngram+"))
    if not config.drafter.startswith("ngram+"):
        return policy, rule
    mixed = Mixed(policy, rule, NgramTree(config.ngram))
    return mixed, mixed.verifier


def _policy_of_draft(
    config: "GenerateConfig", run: Run, drafter: str
) -> tuple[TreePolicy, Verifier]:
    selectors = run.selectors()
    if config.policy is None and (drafter == "head" or not selectors):
        return Delayed(run.head_action(config.temperature)), verifier(
            config.verifier or "traversal"
        )
    name = config.policy or selectors[0]
    if name in POLICIES and name not in selectors:  # a run may have a selector for the verifier gbv
        return make_policy(name, config.options), verifier(
            config.verifier or default_verifier(name, config.temperature)
        )
    if config.options:
        raise UserError(f"options: policy={name} is a selector, which takes none.")
    selector = Selector.from_pretrained(run.stage("selector") / "export" / name)
    measured = run.stage("latency") / TABLE
    policy = NeuralPolicy(selector, selector.table or LatencyTable.load(measured))
    return policy, verifier(config.verifier) if config.verifier else policy.verifier


def choose_drafter(
    config: "GenerateConfig",
    run: Run,
    target: CausalModel,
    draft: CausalModel | None,
    static: StaticShapes | None,
) -> Drafter:
    """The LM draft, the run's head, n-grams, or these with one of the others.

    Raises UserError where the run has none.
    """
    own, ngram = (
        config.drafter.removeprefix("ngram+"),
        NgramDrafter(target.vocab_size, config.ngram),
    )
    if own == "ngram":
        return ngram
    drafter = _draft_of_run(config, run, target, draft, static, own)
    return MixedDrafter(ngram, drafter) if own != config.drafter else drafter


def _draft_of_run(
    config: "GenerateConfig",
    run: Run,
    target: CausalModel,
    draft: CausalModel | None,
    static: StaticShapes | None,
    name: str,
) -> Drafter:
    if name == "lm" and draft is None:
        raise UserError(
            f"drafter={config.drafter}: this run has no draft model. Use drafter=head,"
            " drafter=ngram, or policy=autoregressive."
        )
    if name == "lm":
        return LMDrafter(draft, static)
    export = run.stage("draft") / "export"
    if not export.is_dir():
        other = "drafter=ngram" if draft is None else "drafter=lm"
        raise UserError(
            f"drafter={config.drafter}: {export} is not there; train a head with stage=draft, or"
            f" use {other}."
        )
    return load_head_draft(export, target).drafter(static)


def check_trained_for(
    config: "GenerateConfig", policy: TreePolicy, drafter: Drafter | None
) -> None:
    """Check that a selector drafts with what it was trained for.

    Raises:
        UserError: it goes with n-grams alone, or with a head that it was not trained for.
    """
    policy, drafter = getattr(policy, "elsewhere", policy), getattr(drafter, "draft", drafter)
    if isinstance(policy, NeuralPolicy) and isinstance(drafter, NgramDrafter):
        raise UserError(
            f"policy={config.policy} with drafter=ngram: a selector looks at the draft's hidden"
            " states, and n-grams have none. Leave policy out, or use drafter=ngram+lm, or one of"
            f" {', '.join(POLICIES)}."
        )
    if not isinstance(policy, NeuralPolicy) or not isinstance(drafter, EagleDrafter):
        return
    trained = policy.selector.schema.pair.get("draft")
    if trained is None or not same_model(trained, fingerprint(drafter.model)):
        raise UserError(
            f"policy={config.policy} with drafter={config.drafter}: this run's selector was not"
            " trained for its head, but for the LM draft, or a head of before. Train one for it"
            f" (python -m pipelines.run run=with_head base={config.run} traces.drafter=head), or"
            f" use drafter=lm, or one of {', '.join(POLICIES)}."
        )


def encoded(config: "GenerateConfig", tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt's token ids, in the chat template where there is one (or `chat` says so)."""
    if config.chat and not tokenizer.chat_template:
        raise UserError("chat=true: the target's tokenizer has no chat template; leave chat out.")
    if tokenizer.chat_template and config.chat is not False:
        turn = [{"role": "user", "content": config.prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(config.prompt)["input_ids"]


@torch.inference_mode()
def stream_text(config: "GenerateConfig", setting: SamplingSetting, run: Run) -> None:
    """See `nde_talf.pipelines.generate.generate`."""
    with threads(config.model.threads):
        pair = Pair(run.stage("pair"))
        placed = config.model.placed
        console.quiet = True  # the text is all that is printed before the figures
        try:
            target, draft = pair.models(*placed) if pair.has_draft else (pair.target(*placed), None)
        finally:
            console.quiet = False
        tokenizer = AutoTokenizer.from_pretrained(pair.where("target"), trust_remote_code=False)
        policy, rule = choose_policy(config, run)
        prompt = encoded(config, tokenizer)
        static = (
            StaticShapes(len(prompt) + config.new_tokens + MARGIN)
            if config.model.static_shapes
            else None
        )
        drafter = (
            None if policy.trees == "none" else choose_drafter(config, run, target, draft, static)
        )
        check_trained_for(config, policy, drafter)
        decoder = SpeculativeDecoder(
            target, drafter, policy, rule, config.draft_temperature, static
        )
        stop = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        decoder.generate(
            prompt, min(WARM_UP, config.new_tokens), setting, Rng.seeded(config.seed)
        )  # so that times are true
        stream = decoder.blocks(prompt, config.new_tokens, setting, Rng.seeded(config.seed), stop)
        console.print(Text(config.prompt, style="dim"), end="")
        tokens = prompt
        for block in stream:
            for i, text in enumerate(pieces(tokenizer, tokens, block.tokens)):
                console.print(
                    Text(text, style="green" if i < block.accepted else "bold yellow"),
                    end="",
                    soft_wrap=True,
                )
            tokens = [*tokens, *block.tokens]
        console.print("\n")
        if len(stream.generation.tokens) < config.new_tokens and tokens[-1] not in stop:
            console.print(
                f"! the context of {decoder.max_context} tokens is full, so the text ends here."
            )
        console.print(statistics(stream.generation, decoder.drafting), soft_wrap=True)
        if config.compare:
            plain = SpeculativeDecoder(
                target, None, Autoregressive(), VERIFIERS["naive"], static=static
            )
            console.print(
                compared(decoder, plain, prompt, config.new_tokens, setting, config.seed),
                soft_wrap=True,
            )


def compared(
    decoder: SpeculativeDecoder,
    plain: SpeculativeDecoder,
    prompt: list[int],
    count: int,
    setting: SamplingSetting,
    seed: int,
) -> str:
    """Compare the speed of `decoder` and `plain` on one prompt, in words.

    Both run in turn with the same seeds, after one pass that warms up. The end-of-text token does
    not stop either, so that both decode `count` tokens.
    """
    seeds = range(seed, seed + PASSES + 1)
    pairs = [
        [run.generate(prompt, count, setting, Rng.seeded(turn)) for run in (decoder, plain)]
        for turn in seeds
    ]
    if not all(run.steps for pair in pairs[1:] for run in pair):
        return "compare=true needs more new tokens."
    rates = [[run.decoded / run.decode_seconds for run in pair] for pair in pairs[1:]]
    ratios, (ours, theirs) = sorted(a / b for a, b in rates), map(median, zip(*rates, strict=True))
    text = (
        f"{median(ratios):.2f} times as fast as autoregressive decoding ({ratios[0]:.2f} to"
        f" {ratios[-1]:.2f} in {PASSES} pairs of passes over this prompt, in turn; {ours:.0f}"
        f" against {theirs:.0f} tokens/s, batch size 1, prefill left out)."
    )
    if setting.temperature == 0:
        equal = pairs[-1][0].tokens == pairs[-1][1].tokens
        text += (
            " The two texts are equal." if equal else " The two texts differ: see docs/decoding.md."
        )
    return text


def statistics(generation: Generation, drafter: Drafter | None = None) -> str:
    """Format one line of figures of a generation.

    They are speed, tokens a target pass, tree size, fractions of the time, memory, and what n-grams
    drafted.
    """
    stats, decode = generation.stats, generation.decode_seconds
    parts = [f"{len(generation.tokens)} tokens, the first after {1e3 * stats.ttft:.0f} ms"]
    if generation.steps:
        parts += [
            f"{1 / stats.tpot:.0f} tokens/s ({1e3 * stats.tpot:.1f} ms a token)",
            f"{stats.block_efficiency:.2f} tokens a target pass",
            f"{stats.mean_nodes:.1f} nodes a tree",
            ", ".join(
                f"{phase} {100 * seconds / decode:.0f} %"
                for phase, seconds in stats.seconds.items()
            ),
        ]
    if sizes := matches(drafter):
        acceptances = ", ".join(
            f"{tested.accepted} of {tested.drafted} at {size}" for size, tested in sizes.items()
        )
        parts.append(f"n-grams accepted by tokens matched: {acceptances}")
    parts.append(f"peak {stats.peak_bytes / 1e6:.0f} MB")
    return "; ".join(parts) + ". Green: accepted drafts; yellow: the target's own."
