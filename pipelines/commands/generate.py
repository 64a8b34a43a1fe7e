"""Stream a text: `nde generate prompt="..."`, from the shipped pair or from a run of your own.

Accepted drafts and the target's own tokens are coloured differently; what decoded it, and how fast,
follows.
"""

from dataclasses import field, replace
from typing import Annotated, Any

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from nde_talf.data.text.shipped import SMALL, SMOLLM2
from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import (
    Amount,
    Fraction,
    LongText,
    Natural,
    Place,
    Seed,
    Share,
    Text,
    Tokens,
    one_of,
    settings,
)
from nde_talf.decoding.drafters.ngram_settings import NgramConfig
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting, read_draft_temperature
from nde_talf.pipelines.commands.hub import reach_hub
from nde_talf.pipelines.commands.work import work_of
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.schema import LoadingConfig, PathsConfig
from nde_talf.pipelines.runs.finished import NoRun, Run

DRAFTERS = ("lm", "head", "ngram")
_prompts: list[str] = []
"""Prompts of the command line, which Hydra does not see."""


@settings("model")
class TargetConfig(LoadingConfig):
    """Loading and running of models: a run's, or one without a run."""

    target: Place | None = None
    """Folder or hub name of a model to decode by n-grams, without a run."""


@settings()
class DecodingConfig:
    """A run's pair as it decodes."""

    run: Text = SMALL
    """small: the shipped pair; smollm2: SmolLM2-135M-Instruct with what ships for it (model=NAME is
    the same); or the name of a finished run, its folder under paths.checkpoints.
    """
    drafter: Annotated[str, one_of(DRAFTERS)] | None = None
    """lm: the draft model; head: the run's draft head; ngram: earlier parts of prompt and text,
    without a model; null: the draft model, the head, or n-grams, the first that there is.
    """
    ngram: NgramConfig = field(default_factory=NgramConfig)
    """Length of looked-up n-grams, and how much is drafted of what follows them."""
    policy: Text | None = None
    """A selector of the run by name, or a policy that needs no training; null: the first selector,
    the head's best tree, or trees of n-grams.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Parameters of a policy, such as options.nodes=30."""
    verifier: Annotated[str, one_of(tuple(VERIFIERS.table))] | None = None
    """Verification rule; null: the one that goes with the policy."""
    temperature: Amount = 0.6
    """Sampling temperature; 0: greedy."""
    top_p: Share = 1.0
    """Sample from the smallest set of tokens with this probability together."""
    top_k: Natural = 0
    """Sample from this many most probable tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Sample from the tokens with at least this fraction of the largest probability; 0: from all.
    """
    draft_temperature: Text = "auto"
    """Warp of the draft: match (like the target), raw (not at all), a temperature of
    its own, or auto: raw for trees of picked tokens (beam, optimal, salf, dynatree); 0.6 at
    temperature 0 for drawn ones (sequoia, fixed, dyspec); what a selector was trained with; else
    match.

    The text's law is the same with any.
    """
    new_tokens: Tokens = 128
    """Maximum number of tokens to generate."""
    seed: Seed = 0
    """Seed of the sampling."""
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


@settings()
class GenerateConfig(DecodingConfig):
    """A prompt, and how to decode it."""

    prompt: LongText = ""
    """Text to continue; where the tokenizer has a chat template, the user's question. Empty: a
    held-out prompt of the run, another one for another seed.
    """
    chat: bool = True
    """Put the prompt into the tokenizer's chat template where there is one."""
    compare: bool | None = None
    """Measure the same prompt against autoregressive decoding afterwards; null: with run=small."""
    model: TargetConfig = field(default_factory=lambda: TargetConfig(threads=1))


def generate(config: GenerateConfig) -> None:
    """Print the prompt, the generated text as it comes, then the statistics.

    Raises UserError for what the user can fix.
    """
    alone = config.model.target
    if alone and (config.run != SMALL or config.drafter in ("lm", "head")):
        raise UserError(
            f"model.target={alone}: a model without a run is decoded by n-grams, after prompt=TEXT;"
            f" leave run and drafter out. To train a draft: nde run run=NAME model.target={alone}"
        )
    run = NoRun(alone) if alone else Run(config.run, config.paths.checkpoints)
    policies = (*run.selectors(), *POLICIES.table)
    if config.policy and config.policy not in policies:
        raise UserError(f"policy={config.policy}: choose from {', '.join(policies)}.")
    check_device(config.model.device)
    if run.target:
        reach_hub([run.target])
    quiet()
    work_of("generate").stream(config, run)


def _generate_given(config: GenerateConfig) -> None:
    generate(replace(config, prompt=_prompts[-1]) if _prompts else config)


def without_prompt(arguments: list[str]) -> list[str]:
    """Set the text of `prompt=...` aside.

    Hydra would interpret brackets, quotes and ${...} in it.
    """
    kept = [argument for argument in arguments if not argument.startswith("prompt=")]
    _prompts[:] = (each.partition("=")[2] for each in arguments if each not in kept)
    return kept


def completed(arguments: list[str]) -> list[str]:
    """Set the prompt aside, and read `model=NAME` as `run=NAME`.

    Raises:
        UserError: the model is a preset of `nde run`, which has to train for it first.
    """
    return [*map(_shipped_run, without_prompt(arguments))]


def _shipped_run(argument: str) -> str:
    key, _, name = argument.partition("=")
    if key != "model":
        return argument
    if name not in (SMALL, SMOLLM2):
        raise UserError(
            f"model={name}: choose model={SMALL} or model={SMOLLM2}, which ship; run=NAME, a run of"
            " your own; or model.target=FOLDER_OR_HUB_NAME."
        )
    return f"run={name}"


def main() -> None:
    """The command `nde generate`."""
    launch("generate", GenerateConfig, _generate_given, completed)


if __name__ == "__main__":
    main()
