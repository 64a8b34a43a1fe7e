"""Recommend settings for an engine without a selector.

Example: `python -m nde_talf.pipelines.recommend run=NAME`.

It prints a table, and writes the configurations of vLLM and SGLang into the run's folder
`recommend`.
"""

from nde_talf.pipelines.signals import (
    leave_at_once,
)  # isort: skip (before what takes time to import)

if __name__ == "__main__":
    leave_at_once()

from dataclasses import field
from typing import Annotated

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import hydra
from omegaconf import DictConfig

from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.settings import Text, one_of, settings
from nde_talf.pipelines.cli import CONFIGS, answer, launch, register, settled
from nde_talf.pipelines.config import MEASURED, PathsConfig
from nde_talf.pipelines.finished import Run


@settings()
class RecommendConfig:
    """Settings of a recommendation."""

    run: Text = "default"
    """Name of a run with traces and a latency table, which is its folder under paths.checkpoints.
    """
    base: Text | None = None
    """Another run, whose stages are used where `run` has none; null: the one that `run` was made
    with.
    """
    setting: Annotated[str, one_of(SETTINGS)] | None = None
    """Sampling setting of the requests, one that was traced; null: all traced ones, equally often.
    """
    rejection: Annotated[str, one_of(("standard", "block"))] = "standard"
    """How the engine verifies a path: standard, or block verification
    (rejection_sample_method=block in vLLM).
    """
    table: Text = MEASURED
    """Prices: measured (the run's own latency table), a profile of configs/latency, or a .json
    file.
    """
    paths: PathsConfig = field(default_factory=PathsConfig)


register("recommend_schema", RecommendConfig)


def recommend(config: RecommendConfig) -> None:
    """Print and write what is recommended. Raises UserError for what the user can fix."""
    run = Run(config.run, config.paths.checkpoints, config.base)
    quiet()
    from nde_talf.pipelines.recommended import report  # imports torch

    report(config, run)


@hydra.main(version_base=None, config_path=CONFIGS, config_name="recommend")
def compose_and_recommend(composed: DictConfig) -> None:
    """Recommend with the settings that Hydra has composed."""
    try:
        recommend(settled(composed, RecommendConfig))
    except Exception as error:
        answer(error)


def main() -> None:
    """The command `python -m pipelines.recommend`, which is `nde recommend` too."""
    launch(compose_and_recommend, RecommendConfig)


if __name__ == "__main__":
    main()
