"""Run the stages of a configuration that its quick checks let pass."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console, duration
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.threads import threads
from nde_talf.draft_training.model.families import NoHeadError
from nde_talf.pipelines.commands.dry_run import expected
from nde_talf.pipelines.commands.signals import raise_signals, raise_swallowed
from nde_talf.pipelines.config.machine_checks import check_machine
from nde_talf.pipelines.config.schema import OF_DRAFTER, Config
from nde_talf.pipelines.runs.attempt import Attempt
from nde_talf.pipelines.runs.finished import read_record
from nde_talf.pipelines.runs.lock import locked
from nde_talf.pipelines.runs.record import remember
from nde_talf.pipelines.stages.shared_tokenizer import check_template
from nde_talf.pipelines.stages.table import BY_NAME

LONG = 600
"""Seconds of a stage that says its minutes when it begins."""
SKIPPED = "skipped, as nothing drafts whose trees could be traced"


def run_stages(config: Config) -> None:
    """Run `config.stage`, or all stages in order.

    Of all stages, those that this pair cannot have are skipped, with a line that says so: the head
    of a target that can have none, which is then not evaluated either, and without a draft model
    the stages that need a drafter.
    """
    policies, tracking = config.evaluation.policies, config.tracking.mode
    check_machine(config.model.device, config.selector, policies, tracking)
    check_template(config)
    raise_signals()
    folder = Path(config.paths.checkpoints) / config.run
    if not folder.exists():  # and none is left where the first stage lacks what it needs
        Attempt(BY_NAME[config.stages[0]], config, BY_NAME)
    with locked(folder), threads(config.model.threads):
        if not read_record(folder):  # what is refused below does not replace a record
            remember(folder, config.base)
        left = dict[str, float]()
        with suppress(UserError):  # the stage that meets it says it
            left, _ = expected(config)
        for name in config.stages:
            if (seconds := 60 * left.get(name, 0)) > LONG:
                console.print(
                    f"! {name}: about {duration(seconds)} on this machine, by sizes, not measured"
                    " (dry_run=true times passes)"
                )
            try:
                if name in OF_DRAFTER and config.drafter == "nobody":
                    console.print(f"· {name}: {SKIPPED}")
                else:
                    Attempt(BY_NAME[name], config, BY_NAME).run(config.force)
            except NoHeadError as error:
                config = _without_head(config, error)
            raise_swallowed()
            free_memory()
        remember(folder, config.base)


def _without_head(config: Config, error: Exception) -> Config:
    """Leave the head out of what is traced and evaluated.

    Raises `error` where the head was asked for.
    """
    if config.stage != "all" or config.traces.drafter == "head":
        raise error
    console.print(f"· draft: skipped. {error}")
    methods = [name for name in config.evaluation.methods if name != "head"]
    config = replace(config, evaluation=replace(config.evaluation, methods=methods))
    if config.model.has_draft:
        return config
    return replace(config, traces=replace(config.traces, drafter="nobody"))
