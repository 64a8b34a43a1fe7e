"""What to set in an engine that has no selector: `python -m pipelines.recommend run=NAME`.

It prints a table, and writes the configurations of vLLM and SGLang into the run's folder
`recommend`.
"""

from nde_talf.pipelines.signals import (
    leave_at_once,
)  # isort: skip (before what takes time to import)

if __name__ == "__main__":
    leave_at_once()

from dataclasses import dataclass, field

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.schema import MANY, check_fields, choice, number
from nde_talf.pipelines.cli import CONFIGS, answer, launch, settled
from nde_talf.pipelines.config import MEASURED, PathsConfig
from nde_talf.pipelines.finished import Run
from nde_talf.pipelines.generate import LoadingConfig
from nde_talf.pipelines.machine import check_device


@dataclass
class RecommendConfig:
    """What is to be recommended."""

    run: str = "default"
    """Name of a run with traces and a latency table, which is its folder under paths.checkpoints.
    """
    base: str | None = None
    """Another run, whose stages are used where `run` has none; null: the one that `run` was made
    with.
    """
    setting: str | None = choice(None, SETTINGS)
    """Sampling setting of the requests, one that was traced; null: all traced ones, equally often.
    """
    rejection: str = choice("standard", ("standard", "block"))
    """How the engine verifies a path: standard, or block verification
    (rejection_sample_method=block in vLLM).
    """
    table: str = MEASURED
    """Prices: measured (the run's own latency table), a profile of configs/latency, or a .json
    file.
    """
    confidence_prompts: int = number(14, 0, MANY)
    """Prompts of the trace split, half of them to choose a threshold of confidence on and half to
    report it; 0: leave it out, and load no model.
    """
    model: LoadingConfig = field(default_factory=LoadingConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.confidence_prompts == 1:
            raise UserError(
                "confidence_prompts=1: half of them choose a threshold and half report it; give 2,"
                " or 0 for none."
            )


ConfigStore.instance().store(name="recommend_schema", node=RecommendConfig)


def recommend(config: RecommendConfig) -> None:
    """Print and write what is recommended. Raises UserError for what the user can fix."""
    run = Run(config.run, config.paths.checkpoints, config.base)
    for key in ("device", "draft_device"):
        check_device(getattr(config.model, key) or "cpu", f"model.{key}")
    quiet()
    from nde_talf.pipelines.recommended import report  # imports torch

    report(config, run)


@hydra.main(version_base=None, config_path=CONFIGS, config_name="recommend")
def compose_and_recommend(composed: DictConfig) -> None:
    try:
        recommend(settled(composed, RecommendConfig))
    except Exception as error:
        answer(error)


def main() -> None:
    """The command `python -m pipelines.recommend`, which is `nde recommend` too."""
    launch(compose_and_recommend, RecommendConfig, "recommend")


if __name__ == "__main__":
    main()
