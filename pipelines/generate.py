"""Stream a text: `nde generate prompt="..."`, from the shipped pair or from a run of your own.

Accepted drafts and the target's own tokens are coloured differently; what decoded it, and how fast,
follows.
"""

from nde_talf.pipelines.signals import leave_at_once  # isort: skip (before what takes time)

if __name__ == "__main__":
    leave_at_once()

import sys
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

from pydantic import Field
from rich.text import Text as Styled

from nde_talf.data.text.shipped import SMALL
from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import (
    Fraction,
    LongText,
    Natural,
    Seed,
    Text,
    one_of,
    settings,
)
from nde_talf.decoding.ngram_settings import NgramConfig
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.decoding.setting import SamplingSetting, read_draft_temperature
from nde_talf.pipelines.cli import launch, register
from nde_talf.pipelines.config import TABLE, LoadingConfig, PathsConfig
from nde_talf.pipelines.finished import Run
from nde_talf.pipelines.machine import threads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nde_talf.data.text.pair import Pair
    from nde_talf.decoding.drafter import Drafter
    from nde_talf.decoding.loop import SpeculativeDecoder
    from nde_talf.decoding.model import CausalModel
    from nde_talf.decoding.policies.base import TreePolicy
    from nde_talf.decoding.static import StaticShapes
    from nde_talf.decoding.verifier import Verifier
    from nde_talf.selector.policy import NeuralPolicy

WARM_UP = 8  # tokens decoded before the text that is shown
DRAFTERS = ("lm", "head", "ngram", "ngram+lm", "ngram+head")
_prompts: list[str] = []
"""Prompts of the command line, which Hydra does not see."""


@settings()
class GenerateConfig:
    """A prompt, and how to decode it."""

    prompt: LongText = ""
    """Text to continue; with a chat template, the user's question. Empty: a held-out prompt of the
    run, another one for another seed.
    """
    run: Text = SMALL
    """small: the shipped pair; or the name of a finished run, its folder under paths.checkpoints.
    """
    base: Text | None = None
    """Another run, whose stages are used where `run` has none; null: the one that `run` was made
    with.
    """
    drafter: Annotated[str, one_of(DRAFTERS)] = "lm"
    """lm: the draft model; head: the run's draft head; ngram: earlier parts of prompt and text,
    without a model; ngram+lm and ngram+head: n-grams where the text repeats itself, else the other.
    """
    ngram: NgramConfig = field(default_factory=NgramConfig)
    """What n-grams are looked up, and how much is drafted of what follows them."""
    policy: Text | None = None
    """A selector of the run by name, or a policy that needs no training; null: the first selector,
    the head's best tree, or trees of n-grams.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Parameters of a policy, such as options.nodes=30."""
    verifier: Annotated[str, one_of(tuple(VERIFIERS.table))] | None = None
    """Verification rule; null: the one that goes with the policy."""
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 0.6
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability together."""
    top_k: Natural = 0
    """Sample from this many most probable tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Sample from the tokens with at least this fraction of the largest probability; 0: from all.
    """
    draft_temperature: Text = "auto"
    """What the draft is warped with: match (like the target), raw (not at all), a temperature of
    its own, or auto: raw for trees of picked tokens (beam, optimal, salf, dynatree); 0.6 at
    temperature 0 for drawn ones (sequoia, fixed, dyspec); what a selector was trained with; else
    match.

    The text's law is the same with any.
    """
    new_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 128
    """Maximum number of tokens to generate."""
    seed: Seed = 0
    """Seed of the sampling."""
    chat: bool | None = None
    """Put the prompt into the tokenizer's chat template; null: where there is one."""
    compare: bool | None = None
    """Measure the same prompt against autoregressive decoding afterwards; null: with run=small."""
    model: LoadingConfig = field(default_factory=lambda: LoadingConfig(threads=1))
    paths: PathsConfig = field(default_factory=PathsConfig)

    @property
    def setting(self) -> SamplingSetting:
        """Sampling setting of the text."""
        return SamplingSetting(self.temperature, self.top_p, self.top_k, self.min_p)

    def __post_init__(self) -> None:
        read_draft_temperature(self.draft_temperature)
        if self.policy == "autoregressive" and self.draft_temperature != "auto":
            raise UserError(
                f"draft_temperature={self.draft_temperature}: policy=autoregressive drafts nothing;"
                " leave it out."
            )
        if self.verifier == "greedy" and self.temperature > 0:
            raise UserError(
                "verifier=greedy is lossless at temperature 0 only: set temperature=0, or take"
                " verifier=nss."
            )


register("generate_schema", GenerateConfig)


def generate(config: GenerateConfig) -> None:
    """Print the prompt, the generated text as it comes, then the statistics.

    Raises UserError for what the user can fix.
    """
    run = Run(config.run, config.paths.checkpoints, config.base)
    policies = (*run.selectors(), *POLICIES.table)
    if config.policy and config.policy not in policies:
        raise UserError(f"policy={config.policy}: choose from {', '.join(policies)}.")
    check_device(config.model.device)
    quiet()
    import torch

    from nde_talf.data.text.pair import Pair

    with threads(config.model.threads), torch.inference_mode():
        _stream(config, run, Pair(run.stage("pair")))


def _stream(config: GenerateConfig, run: Run, pair: "Pair") -> None:
    """Decode, and print the text as it comes, then the figures."""
    from nde_talf.data.text.templates import load_tokenizer
    from nde_talf.decoding.sampling import Rng
    from nde_talf.decoding.static import MARGIN, StaticShapes
    from nde_talf.evaluation.sample import pieces
    from nde_talf.pipelines.figures import compared, described, statistics

    tokenizer = load_tokenizer(pair.where("target"))
    config.prompt = config.prompt or _held_out(pair, config.seed)
    prompt, setting = encoded(config, tokenizer), config.setting
    static = None
    if config.model.static_shapes:
        static = StaticShapes(len(prompt) + config.new_tokens + MARGIN)
    decoder = make_decoder(config, run, pair, static)
    stop = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    # Warmed up, so that times are true.
    decoder.generate(prompt, min(WARM_UP, config.new_tokens), setting, Rng.seeded(config.seed))
    stream = decoder.blocks(prompt, config.new_tokens, setting, Rng.seeded(config.seed), stop)
    console.print(Styled(config.prompt, style="dim"), end="")
    tokens = prompt
    for block in stream:
        for i, text in enumerate(pieces(tokenizer, tokens, block.tokens)):
            style = "green" if i < block.accepted else "bold yellow"
            console.print(Styled(text, style=style), end="", soft_wrap=True)
        tokens = [*tokens, *block.tokens]
    console.print("\n")
    if len(stream.generation.tokens) < config.new_tokens and tokens[-1] not in stop:
        console.print(
            f"! the context of {decoder.max_context} tokens is full, so the text ends here."
        )
    compare = run.shipped if config.compare is None else config.compare
    console.print(
        described(decoder, config.policy or config.drafter, config.drafter, setting),
        style="dim",
        soft_wrap=True,
    )
    console.print(statistics(stream.generation, decoder.drafting, compare), soft_wrap=True)
    if compare:
        console.print(
            compared(decoder, prompt, config.new_tokens, setting, config.seed), soft_wrap=True
        )


def _held_out(pair: "Pair", seed: int) -> str:
    """Return a prompt of the pair's test split."""
    prompts = [prompt.text for prompt in pair.every_prompt() if prompt.split == "test"]
    return prompts[seed % len(prompts)]


def open_run(
    run: str = SMALL, **settings: Any
) -> "tuple[SpeculativeDecoder, PreTrainedTokenizerBase]":
    """Return the decoder of the shipped pair, or of a finished run, and the target's tokenizer.

    Args:
        run: "small", or the name of a run.
        settings: other keys of `nde generate`, such as drafter="head" or policy="dyspec".

    Raises:
        UserError: there is no such run, or it lacks what is asked for.
    """
    from nde_talf.data.text.pair import Pair
    from nde_talf.data.text.templates import load_tokenizer

    config = GenerateConfig(run=run, **settings)
    finished = Run(config.run, config.paths.checkpoints, config.base)
    pair = Pair(finished.stage("pair"))
    tokenizer = load_tokenizer(pair.where("target"))
    return make_decoder(config, finished, pair, None), tokenizer


def encoded(config: GenerateConfig, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the prompt's token ids, in the chat template where there is one and `chat` allows."""
    if config.chat and not tokenizer.chat_template:
        raise UserError("chat=true: the target's tokenizer has no chat template; leave chat out.")
    if tokenizer.chat_template and config.chat is not False:
        turn = [{"role": "user", "content": config.prompt}]
        from nde_talf.data.text.templates import render

        text = render(tokenizer, turn, "prompt", add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(config.prompt)["input_ids"]


def make_decoder(
    config: GenerateConfig, run: Run, pair: "Pair", static: "StaticShapes | None"
) -> "SpeculativeDecoder":
    """Load what the configuration asks for: models, policy, rule and drafter.

    Raises:
        UserError: the run has none of these, or they do not go together.
    """
    from nde_talf.decoding.loop import SpeculativeDecoder
    from nde_talf.decoding.mixed import Mixed, MixedDrafter
    from nde_talf.decoding.ngram import NgramDrafter
    from nde_talf.decoding.policies.ngram import NgramTree
    from nde_talf.pipelines.table_here import table_here
    from nde_talf.selector.policy import NeuralPolicy

    policy, rule = choose_policy(config, run)
    console.quiet = True  # the text is all that is printed before the figures
    try:
        placed = config.model.placed
        target, draft = pair.models(*placed) if pair.has_draft else (pair.target(*placed), None)
    finally:
        console.quiet = False
    if run.shipped and isinstance(policy, NeuralPolicy) and draft is not None:
        text = pair.rows("held_out")[0].tolist()
        policy = NeuralPolicy(policy.selector, table_here(policy.table, target, draft, text))
    ngram, mixed = (
        NgramDrafter(target.vocab_size, config.ngram),
        config.drafter.startswith("ngram+"),
    )
    drafter: Drafter | None = None
    if mixed or policy.trees != "none":
        alone = config.drafter == "ngram"
        drafter = ngram if alone else _draft_of_run(config, run, target, draft, static)
        if isinstance(policy, NeuralPolicy):
            _check_trained_for(config, policy, drafter)
    if mixed and drafter:
        policy = Mixed(policy, rule, NgramTree(config.ngram))
        rule, drafter = policy.verifier, MixedDrafter(ngram, drafter)
    return SpeculativeDecoder(target, drafter, policy, rule, config.draft_temperature, static)


def choose_policy(config: GenerateConfig, run: Run) -> "tuple[TreePolicy, Verifier]":
    """Return the policy asked for, and its verifier. Raises UserError for options it lacks."""
    from nde_talf.pipelines.policy_table import default_verifier, make_policy

    name, selectors = config.policy, run.selectors()
    policy: TreePolicy
    # A run may have a selector for the verifier gbv, which is a policy's name too.
    if name and name in POLICIES and name not in selectors:
        policy = make_policy(name, config.options)
        rule = VERIFIERS[default_verifier(name, config.temperature)]
    elif config.options:
        raise UserError(
            "options: they are those of a policy, such as policy=salf. A selector takes none, and"
            " those of drafter=ngram are the keys of ngram, such as ngram.nodes=8."
        )
    elif name is None and (config.drafter in ("ngram", "head", "ngram+head") or not selectors):
        policy, rule = _policy_of_drafter(config, run)
    else:
        policy = _selector(run, name or selectors[0])
        rule = policy.verifier
    return policy, VERIFIERS[config.verifier] if config.verifier else rule


def _policy_of_drafter(config: GenerateConfig, run: Run) -> "tuple[TreePolicy, Verifier]":
    """Return the trees of a drafter without a selector."""
    from nde_talf.decoding.policies.delayed import Delayed
    from nde_talf.decoding.policies.ngram import NgramTree

    if config.drafter == "ngram":
        return NgramTree(config.ngram), VERIFIERS["nss" if config.temperature else "greedy"]
    return Delayed(run.head_action(config.temperature)), VERIFIERS["traversal"]


def _selector(run: Run, name: str) -> "NeuralPolicy":
    from nde_talf.selector.latency import LatencyTable
    from nde_talf.selector.network import Selector
    from nde_talf.selector.policy import NeuralPolicy

    selector = Selector.from_pretrained(run.stage("selector") / "export" / name)
    return NeuralPolicy(selector, selector.table or LatencyTable.load(run.stage("latency") / TABLE))


def _draft_of_run(
    config: GenerateConfig,
    run: Run,
    target: "CausalModel",
    draft: "CausalModel | None",
    static: "StaticShapes | None",
) -> "Drafter":
    from nde_talf.decoding.drafter import LMDrafter
    from nde_talf.pipelines.drafted import load_head_draft

    if config.drafter.endswith("lm"):
        if draft is None:
            raise UserError(
                f"drafter={config.drafter}: this run has no draft model. Use drafter=head,"
                " drafter=ngram, or policy=autoregressive."
            )
        return LMDrafter(draft, static)
    export = run.stage("draft") / "export"
    if not export.is_dir():
        raise UserError(
            f"drafter={config.drafter}: {export} is not there; train a head with stage=draft, or"
            f" use drafter={'ngram' if draft is None else 'lm'}."
        )
    return load_head_draft(export, target).drafter(static)


def _check_trained_for(config: GenerateConfig, policy: "NeuralPolicy", drafter: "Drafter") -> None:
    """Raise UserError for a selector with n-grams, or with a head it was not trained for."""
    from nde_talf.draft_training.head_drafter import EagleDrafter
    from nde_talf.selector.fingerprint import fingerprint, same_model

    if config.drafter == "ngram":
        raise UserError(
            f"policy={config.policy} with drafter=ngram: a selector looks at the draft's hidden"
            " states, and n-grams have none. Leave policy out, or use drafter=ngram+lm, or one of"
            f" {', '.join(POLICIES)}."
        )
    if not isinstance(drafter, EagleDrafter):
        return
    trained = policy.selector.schema.pair.get("draft")
    if trained is None or not same_model(trained, fingerprint(drafter.model)):
        raise UserError(
            f"policy={config.policy} with drafter={config.drafter}: this run's selector was not"
            " trained for its head, but for the LM draft, or a head of before. Train one for it"
            f" (nde run run=with_head base={config.run} traces.drafter=head), or"
            f" use drafter=lm, or one of {', '.join(POLICIES)}."
        )


def _generate_given(config: GenerateConfig) -> None:
    generate(replace(config, prompt=_prompts[-1]) if _prompts else config)


def without_prompt(argument: str) -> str:
    """Set the text of `prompt=...` aside.

    Hydra would interpret brackets, quotes and ${...} in it.
    """
    key, equals, value = argument.partition("=")
    if key != "prompt" or not equals:
        return argument
    _prompts.append(value)
    return "prompt=given"


def main() -> None:
    """The command `python -m pipelines.generate`, which is `nde generate` too."""
    sys.argv = [without_prompt(argument) for argument in sys.argv]
    launch("generate", GenerateConfig, _generate_given)


if __name__ == "__main__":
    main()
