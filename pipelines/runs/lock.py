"""One process at a time works on a run: it locks a file in the run's folder, which holds its name.

The operating system drops the lock when the process ends, however it ends, so that a kill leaves no
stale lock. Run and lock are opened without following links.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import refuse_link, remove_temporaries
from nde_talf.decoding.common.progress import console
from nde_talf.evaluation.environment import command

LOCK = ".lock"
HELD = "process "
"""Beginning of a lock's content."""


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run's folder inside the block.

    Half-written leftovers of killed processes are removed from it first.

    Raises:
        UserError: another process has it, which the message names; or the folder or its lock cannot
            be made, or is another's.
    """
    refuse_link(run)
    path = run.resolve() / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(path, blocking=False).acquire()
    except Timeout as error:
        raise UserError(
            f"{path.parent} is in use: {_holder(path)} works on this run. Wait until it ends, or"
            " stop it, or give this one another name (run=NAME; for the recipe state=FOLDER)."
        ) from error
    except OSError as error:
        fault = "it is a file" if run.is_file() else f"{error.filename}: {error.strerror}"
        raise UserError(
            f"{run}: {fault}, so no run can be there. Give paths.checkpoints=FOLDER or run=NAME"
            " (the recipe: state=FOLDER)."
        ) from error
    with held:
        _enter(path)
        yield


def _enter(path: Path) -> None:
    """Write into the held lock who holds it, and clean the run.

    Raises UserError for another program's file, or a folder of another spelling.
    """
    run = path.parent
    if run.name not in os.listdir(run.parent):  # this file system takes both for one
        raise UserError(
            f"{run}: there is a folder of this name in other letters (small or capital), which is"
            " another run's. Give another name (run=NAME)."
        )
    since, asked = datetime.now(UTC).isoformat(timespec="seconds"), command()[:300]
    refuse_link(path)
    with path.open("r+", encoding="utf-8", errors="replace") as stream:
        if (before := stream.read(len(HELD))) not in ("", HELD):
            raise UserError(
                f"{path}: another program wrote it, so {run} is no run's folder. Give another name"
                " (run=NAME)."
            )
        stream.seek(0)
        stream.write(f"{HELD}{os.getpid()} on {socket.gethostname()} (since {since}: {asked})")
        stream.truncate()
    if before and (left := remove_temporaries(run)):  # a run never begun here has left nothing
        console.print(
            f"! removed from {run} what a command that was killed left: {', '.join(left)}"
        )


def _holder(path: Path) -> str:
    """Return the name in a lock that another process holds."""
    name = ""
    with suppress(OSError, ValueError):
        name = path.read_text()
    return name or "another process"
