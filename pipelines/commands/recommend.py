"""Recommend what to train for a pair, or settings for an engine without a selector.

`nde recommend model.target=... model.draft=... data=prompts.jsonl` decodes a few prompts before
anything is trained. `nde recommend run=NAME` prints a table, and writes vLLM's configuration into
the run's folder `recommend`.
"""

import re
from dataclasses import field
from typing import Annotated

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from nde_talf.data.text.shipped import SMOLLM2, smollm2
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import Place, Text, one_of, settings
from nde_talf.pipelines.commands.work import work_of
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.schema import LoadingConfig, PathsConfig
from nde_talf.pipelines.runs.finished import Run


@settings("model")
class ProbedConfig(LoadingConfig):
    """The pair that is probed."""

    target: Place | None = None
    """Folder, GGUF file or hub name of a target to probe with `prompts`, without a run."""
    draft: Place | None = None
    """The same of a draft model beside it; null: n-grams alone are decoded."""


@settings()
class RecommendConfig:
    """Settings of a recommendation."""

    model: ProbedConfig = field(default_factory=ProbedConfig)
    prompts: Text | None = None
    """With model.target: a file of prompts, as data=FILE of `nde run`; data=FILE is the same."""
    run: Text = "default"
    """Name of a run with traces and a latency table, which is its folder under paths.checkpoints.
    """
    setting: Annotated[str, one_of(SETTINGS)] | None = None
    """Sampling setting of the requests, of a run one that was traced; null: all traced ones,
    equally often, and t0.6 with model.target.
    """
    paths: PathsConfig = field(default_factory=PathsConfig)


def recommend(config: RecommendConfig) -> None:
    """Print and write what is recommended.

    Raises UserError where traces or a table are missing, damaged, or of another pair, and where a
    probe lacks its target or its prompts.
    """
    target = config.model.target
    if bool(target) != bool(config.prompts) or (config.model.draft and not target):
        raise UserError(
            "model.target, data: a probe needs both; give model.target=FOLDER_OR_HUB_NAME"
            " data=prompts.jsonl, and model.draft where there is a draft model."
        )
    if target and config.run != "default":
        raise UserError("model.target: a probe reads no run; leave run out.")
    if target:
        check_device(config.model.device)
        quiet()
        return work_of("probe").probe(config)
    run = Run(config.run, config.paths.checkpoints)
    quiet()
    work_of("recommend").recommend_from(config, run)


def completed(arguments: list[str]) -> list[str]:
    """Read `data=FILE` as `prompts=FILE`, and `model=smollm2` as its target.

    Both are groups of presets for `nde run`, which Hydra would look up.
    """
    read = [re.sub(r"^data=", "prompts=", argument) for argument in arguments]
    known = {f"model={SMOLLM2}": f"model.target={smollm2()}"}
    return [known.get(argument, argument) for argument in read]


def main() -> None:
    """The command `nde recommend`."""
    launch("recommend", RecommendConfig, recommend, completed)


if __name__ == "__main__":
    main()
