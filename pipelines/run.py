"""The command line: `python -m pipelines.run [stage=...] [key=value ...]`."""

import errno
import signal
import sys
import threading

from pipelines.quiet import quiet  # isort: skip (before torch)

import hydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decoding.errors import UserError
from pipelines import config as configuration
from pipelines.checks import check_config
from pipelines.cli import fail
from pipelines.config import STAGES, Config
from pipelines.stage import console, locate, run_stage
from pipelines.stages import all_stages
from pipelines.threads import threads
from pipelines.traces import STAGE, verify

configuration.register()


def run(config: Config) -> None:
    """Run `config.stage`, or all stages in order. Raises UserError for what the user can mend."""
    quiet()
    check_config(config)
    if config.verify:
        return verify(locate(STAGE, config))
    stages = all_stages()
    interrupted = catch_interrupts()
    with threads(config.model.threads):
        for name in STAGES if config.stage == "all" else (config.stage,):
            run_stage(stages[name], config, stages, config.force)
            if interrupted.is_set():
                raise KeyboardInterrupt


def catch_interrupts() -> threading.Event:
    """Remember Ctrl-C besides raising it: libraries that are just finishing something may swallow the exception."""
    interrupted = threading.Event()

    def handler(number, frame) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    return interrupted


@hydra.main(version_base=None, config_path="../configs", config_name="config")
def main(composed) -> None:
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        fail(f"the configuration does not fit: {error}. See --help for all keys.")
    try:
        run(config)
    except UserError as error:
        fail(str(error))
    except (KeyboardInterrupt, SystemExit):  # Lightning turns Ctrl-C into an exit
        same = "The same command without force=true" if config.force else "The same command"
        console.print(f"\n[yellow]Interrupted.[/] {same} goes on from here.")
        sys.exit(130)
    except Exception as error:
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


if __name__ == "__main__":
    main()
