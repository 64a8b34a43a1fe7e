"""The command line: `python -m pipelines.run [stage=...] [key=value ...]`."""

import errno
import signal
import sys
import threading
from pathlib import Path

from pipelines.quiet import quiet  # isort: skip (before torch)

import hydra

from decoding.common.errors import UserError
from decoding.common.progress import console
from pipelines import config as configuration
from pipelines.aliases import current
from pipelines.checks import check_config, check_machine
from pipelines.cli import CONFIGS, fail, launch, settled
from pipelines.config import OF_DRAFT_MODEL, Config
from pipelines.finished import remember
from pipelines.sharding import follows, sharded

configuration.register()


def run(config: Config) -> None:
    """Run `config.stage`, or all stages in order. Raises UserError for what the user can fix.

    Of all stages, those that this pair cannot have are skipped, with a line that says so: stages of the draft model where there
    is none, and the head of a target that can have none, which is then not evaluated either.
    """
    if not config.dry_run and follows(config.model):
        return
    check_config(config)
    if config.dry_run:
        from pipelines.dry_run import dry_run

        return dry_run(config)
    console.print("[dim]loading torch, transformers and Lightning ...[/]")
    quiet()
    check_machine(config)
    # Imported here, after the checks: they take seconds.
    from draft_training.families import NoHead
    from pipelines import ablations, draft, evaluate, latency, pair, selector, traces
    from pipelines.lock import locked
    from pipelines.machine import threads
    from pipelines.stage import locate, run_stage

    if config.verify:
        return traces.verify(locate(traces.STAGE, config))
    stages = {own.STAGE.name: own.STAGE for own in (pair, latency, traces, selector, draft, evaluate, ablations)}
    interrupted = catch_interrupts()
    folder = Path(config.paths.checkpoints) / config.run
    with locked(folder), threads(config.model.threads), sharded(config.model):
        for name in config.stages if config.stage == "all" else (config.stage,):
            if name in OF_DRAFT_MODEL and not config.drafts:
                console.print(f"[yellow]·[/] {name}: skipped, as there is no draft model (model.draft)")
                continue
            try:
                run_stage(stages[name], config, stages, config.force)
            except NoHead as error:
                if config.stage != "all" or config.traces.drafter == "head":
                    raise
                console.print(f"[yellow]·[/] {name}: skipped. {error}")
                config.evaluation.methods = [method for method in config.evaluation.methods if method != "head"]
            remember(folder, config.base)
            if interrupted.is_set():
                raise KeyboardInterrupt


def catch_interrupts() -> threading.Event:
    """Remember Ctrl-C as well as raising it: a library that is just finishing something may swallow the exception."""
    interrupted = threading.Event()

    def handler(number, frame) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    return interrupted


@hydra.main(version_base=None, config_path=CONFIGS, config_name="config")
def compose_and_run(composed) -> None:
    try:
        config = settled(composed, Config)
        run(config)
    except UserError as error:
        fail(str(error))
    except (KeyboardInterrupt, SystemExit):  # Lightning turns Ctrl-C into an exit
        same = "The same command without force=true" if config.force else "The same command"
        console.print(f"\n[yellow]Interrupted.[/] {same} goes on from here.")
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES):
            fail(f"{error.filename}: it cannot be written ({error.strerror}). Give another folder: paths.checkpoints=FOLDER.")
        if not disk_is_full(error):
            raise
        fail(
            f"the disk is full ({config.paths.checkpoints}). Free some space, or set paths.checkpoints to another disk, and "
            "run the same command again; everything finished so far is kept."
        )


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, was a lack of disk space; libraries wrap it in types of their own."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> None:
    """The command `python -m pipelines.run`, which is `nde run` too."""
    sys.argv[1:] = map(current, sys.argv[1:])
    launch(compose_and_run, Config, "config")


if __name__ == "__main__":
    main()
