"""The command line: `nde run [stage=...] [key=value ...]`."""

from nde_talf.pipelines.commands.signals import (
    interrupted,
    leave_at_once,
    raise_signals,
    raise_swallowed,
    status,
)  # isort: skip (before what takes time to import)

if __name__ == "__main__":
    leave_at_once()

import sys
from contextlib import suppress
from pathlib import Path

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console, duration
from nde_talf.pipelines.commands.machine import reach_hub, threads
from nde_talf.pipelines.config.checks import check_config, check_machine, names_on_hub
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.own_data import fit
from nde_talf.pipelines.config.schema import OF_DRAFTER, Config
from nde_talf.pipelines.runs.finished import read_record
from nde_talf.pipelines.runs.record import completed, remember

LONG = 600
"""Seconds of a stage that are told when it begins."""
SKIPPED = (
    "skipped, as nothing drafts whose trees could be traced (model.draft=distil trains a draft"
    " model)"
)


def run(config: Config) -> None:
    """Run `config.stage`, or all stages in order.

    Raises UserError for what the user can fix.

    Of all stages, those that this pair cannot have are skipped, with a line that says so: the head
    of a target that can have none, which is then not evaluated either, and without a draft model
    the stages that need a drafter.
    """
    reach_hub(names_on_hub(config))
    faults = fit(config)
    if config.dry_run:
        from nde_talf.pipelines.commands.dry_run import dry_run

        return dry_run(config, faults)
    check_config(config, faults)
    console.print("loading torch, transformers and Lightning ...", style="dim")
    quiet()
    check_machine(config)
    # Imported here, after the checks: they take seconds.
    from nde_talf.decoding.device import free_memory
    from nde_talf.draft_training.model.families import NoHeadError
    from nde_talf.pipelines.commands.dry_run import expected
    from nde_talf.pipelines.runs.lock import locked
    from nde_talf.pipelines.stages.pair import check_template
    from nde_talf.pipelines.stages.stage import Attempt, every_stage

    stages = every_stage()
    check_template(config)
    raise_signals()
    folder = Path(config.paths.checkpoints) / config.run
    with locked(folder), threads(config.model.threads):
        if not read_record(folder):  # what is refused below does not replace a record
            remember(folder, config.base)
        left = dict[str, float]()
        with suppress(UserError):  # the stage that meets it says it
            left, _ = expected(config)
        for name in config.stages:
            if (seconds := 60 * left.get(name, 0)) > LONG:
                console.print(
                    f"! {name}: about {duration(seconds)} on this machine, an estimate from sizes"
                    " (dry_run=true times passes)"
                )
            try:
                if name in OF_DRAFTER and config.drafter == "nobody":
                    console.print(f"· {name}: {SKIPPED}")
                else:
                    Attempt(stages[name], config, stages).run(config.force)
            except NoHeadError as error:
                _without_head(config, error)
            raise_swallowed()
            free_memory()
        remember(folder, config.base)


def _without_head(config: Config, error: Exception) -> None:
    """Leave the head out of what is traced and evaluated.

    Raises `error` where the head was asked for.
    """
    if config.stage != "all" or config.traces.drafter == "head":
        raise error
    console.print(f"· draft: skipped. {error}")
    if not config.model.has_draft:
        config.traces.drafter = "nobody"
    config.evaluation.methods = [name for name in config.evaluation.methods if name != "head"]


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
