"""The command line: `python -m pipelines.run [stage=...] [key=value ...]`."""

import os
import sys

os.environ.setdefault("HYDRA_FULL_ERROR", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hydra
from omegaconf import OmegaConf
from rich.panel import Panel

from decoding.errors import UserError
from pipelines import config as configuration
from pipelines.config import STAGES, Config
from pipelines.stage import console

configuration.register()


def run(config: Config) -> None:
    """Run `config.stage`, or all stages in order. Raises UserError for what the user can mend."""
    from pipelines.stages import all_stages  # heavy imports, after the configuration is known to be sound

    stages = all_stages()
    names = STAGES if config.stage == "all" else (config.stage,)
    from pipelines.checks import check_config
    from pipelines.stage import run_stage

    check_config(config)
    for name in names:
        run_stage(stages[name], config, stages, config.force)


@hydra.main(version_base=None, config_path="../configs", config_name="config")
def main(composed) -> None:
    try:
        run(OmegaConf.to_object(composed))
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        console.print("\n[yellow]Interrupted.[/] The same command goes on from here.")
        sys.exit(130)


def fail(message: str) -> None:
    """Print one paragraph and exit with status 1."""
    console.print(Panel(message, title="error", border_style="red"), soft_wrap=False)
    sys.exit(1)


if __name__ == "__main__":
    main()
