"""The command line: `nde run [stage=...] [key=value ...]`."""

from nde_talf.pipelines.commands.signals import (
    interrupted,
    leave_at_once,
    status,
)  # isort: skip (before what takes time to import)

if __name__ == "__main__":
    leave_at_once()

import sys

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from nde_talf.decoding.common.progress import console
from nde_talf.pipelines.commands.hub import reach_hub
from nde_talf.pipelines.commands.work import work_of
from nde_talf.pipelines.config.checks import check_config, names_on_hub
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.own_data import fit
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.runs.record import completed


def run(config: Config) -> None:
    """Run `config.stage`, or all stages in order.

    Raises UserError for what the user can fix.
    """
    reach_hub(names_on_hub(config))
    config, faults = fit(config)
    if config.dry_run:
        return work_of("dry_run").dry_run(config, faults)
    check_config(config, faults)
    console.print("loading torch, transformers and Lightning ...", style="dim")
    quiet()
    work_of("run").run_stages(config)


def run_or_end(config: Config) -> None:
    """Run the stages; an interruption ends the command with one line."""
    try:
        run(config)
    except BaseException as error:
        if not interrupted(error):
            raise
        leave_at_once()
        same = "The same command without force=true" if config.force else "The same command"
        console.print(f"\nInterrupted. {same} goes on from here.", style="yellow")
        sys.exit(status())


def main() -> None:
    """The command `python -m pipelines.run`, which is `nde run` too."""
    launch("config", Config, run_or_end, completed)
    leave_at_once()


if __name__ == "__main__":
    main()
