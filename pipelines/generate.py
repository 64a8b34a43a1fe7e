"""Stream a text from a finished run: `python -m pipelines.generate run=NAME prompt="..."`. Accepted drafts and the target's own
tokens are coloured differently; a line of statistics follows."""

import sys
from dataclasses import dataclass, field
from typing import Any

import pipelines.packages  # noqa: F401  # isort: skip (before all others)
from pipelines.quiet import quiet  # isort: skip (before torch)

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from decoding.common.errors import UserError
from decoding.common.progress import console
from decoding.names import PLAIN_POLICIES, RULES
from decoding.setting import SamplingSetting
from pipelines.cli import CONFIGS, fail, launch, settled
from pipelines.config import PathsConfig
from pipelines.device_check import check_device
from pipelines.finished import Run

_prompts: list[str] = []  # of the command line

# Keys of an earlier version, and what they are called now.
RENAMED = {
    "device": "model.device",
    "dtype": "model.dtype",
    "static_shapes": "model.static_shapes",
    "threads": "model.threads",
    "checkpoints": "paths.checkpoints",
}


@dataclass
class InferenceConfig:
    """How the models run. static_shapes: of all passes, see docs/decoding.md. threads: of the CPU, 0 leaves torch's own."""

    device: str = "cpu"
    dtype: str = "float32"
    static_shapes: bool = False
    threads: int = 1


@dataclass
class GenerateConfig:
    """run, base: as in pipelines.run. drafter: lm or head. policy: an exported selector ("traversal", "specinfer", "across") or
    a policy of pipelines/policy_table.py; null: the run's first selector, or the head's best static tree. options: of such a
    policy, such as options.nodes=30. verifier: null takes the policy's own. chat: put the prompt into the tokenizer's chat
    template; null: where there is one. compare: measure the same prompt against autoregressive decoding afterwards."""

    prompt: str = MISSING
    run: str = "default"
    base: str | None = None
    drafter: str = "lm"
    policy: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    verifier: str | None = None
    temperature: float = 0.6
    top_p: float = 1.0
    new_tokens: int = 128
    seed: int = 0
    chat: bool | None = None
    compare: bool = False
    model: InferenceConfig = field(default_factory=InferenceConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


ConfigStore.instance().store(name="generate_schema", node=GenerateConfig)


def generate(config: GenerateConfig) -> None:
    """Print the prompt, what is generated as it comes, then the statistics. Raises UserError for what the user can mend."""
    setting = SamplingSetting(config.temperature, config.top_p)
    if config.drafter not in ("lm", "head"):
        raise UserError(f"drafter={config.drafter}: it is lm or head.")
    if config.new_tokens < 1:
        raise UserError(f"new_tokens={config.new_tokens}: it must be at least 1.")
    if not config.prompt:
        raise UserError("prompt: it is empty, and the target has to begin somewhere. Give at least one word.")
    run = Run(config.run, config.paths.checkpoints, config.base)
    policies = (*run.selectors(), *PLAIN_POLICIES)
    if config.policy and config.policy not in policies:
        raise UserError(f"policy={config.policy}: choose from {', '.join(policies)}.")
    if config.verifier and config.verifier not in RULES:
        raise UserError(f"verifier={config.verifier}: choose from {', '.join(RULES)}.")
    if config.verifier == "greedy" and config.temperature > 0:
        raise UserError("verifier=greedy is lossless at temperature 0 only: set temperature=0, or take verifier=nss.")
    check_device(config.model.device)
    quiet()
    from pipelines.streaming import stream_text  # imports torch

    stream_text(config, setting, run)


@hydra.main(version_base=None, config_path=CONFIGS, config_name="generate")
def compose_and_generate(composed) -> None:
    try:
        config = settled(composed, GenerateConfig)
        config.prompt = _prompts[-1] if _prompts else config.prompt
        generate(config)
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def current(argument: str) -> str:
    """An argument under its key of today; an earlier key is told. A policy's option is a new key, which Hydra marks by +."""
    key, equals, value = argument.partition("=")
    if key.startswith("options."):
        return f"+{argument}"
    if not equals or key not in RENAMED:
        return argument
    console.print(f"[yellow]![/] {key}= is called {RENAMED[key]}= now, as in pipelines.run.")
    return f"{RENAMED[key]}={value}"


def without_prompt(argument: str) -> str:
    """`prompt=...` is kept apart as it stands: Hydra would read brackets, quotes and ${...} in it as its own."""
    key, equals, value = argument.partition("=")
    if key != "prompt" or not equals:
        return argument
    _prompts.append(value)
    return "prompt=given"


def main() -> None:
    """The command `python -m pipelines.generate`, which is `nde generate` too."""
    sys.argv = [without_prompt(current(argument)) for argument in sys.argv]
    launch(compose_and_generate, GenerateConfig)


if __name__ == "__main__":
    main()
