"""One process at a time works on a run: it locks a file in the run's folder, which holds its name.

The operating system drops the lock when the process ends, however it ends, so that a kill leaves no
stale lock.
"""

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import remove_temporaries
from nde_talf.decoding.common.progress import console

LOCK = ".lock"
_held: set[Path] = set()
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run's folder inside the block.

    Half-written leftovers of killed processes are removed from it first. A process that holds it
    already, or a fork of it, goes on at once. Where the file system has no locks, a notice says so.

    Raises:
        UserError: another process has it; the message names that process.
    """
    run = run.resolve()
    if run in _held:
        yield
        return
    made = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = "it is a file" if run.is_file() else error.strerror
        raise UserError(
            f"{run}: {fault}, so no run can be there. Give paths.checkpoints=FOLDER or run=NAME."
        ) from error
    try:
        descriptor = _open(run / LOCK)
    except OSError as error:
        console.print(
            f"! {run} cannot be locked ({error.strerror}): let no other process work on this run"
        )
        yield
        return
    owner = os.getpid()
    _held.add(run)
    try:
        with suppress(OSError):  # what cannot be removed does no harm
            for folder in run.iterdir():
                if folder.is_dir() and folder.name != "wandb":
                    remove_temporaries(folder)
        yield
    finally:
        if os.getpid() == owner:  # not in a fork of it
            _held.discard(run)
            with suppress(OSError):
                (run / LOCK).unlink()
                if made:
                    run.rmdir()  # nothing was done
            os.close(descriptor)


def _open(path: Path) -> int:
    """An open descriptor of the lock file, locked and with our name in it.

    Raises UserError if another process has it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _BUSY:
                raise
            who = "another process"
            with suppress(
                OSError, ValueError, LookupError, TypeError
            ):  # its name may not be there yet
                who = "process {pid} on {host} (since {since}: {command})".format(
                    **json.loads(path.read_text())
                )
            raise UserError(
                f"{path.parent} is in use: {who} works on this run. Wait until it ends, or stop it,"
                " or give this one another name (run=NAME)."
            ) from error
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # its holder has just removed it
    since, command = datetime.now(UTC).isoformat(timespec="seconds"), shlex.join(sys.argv)[:300]
    name = {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": since}
    os.ftruncate(descriptor, 0)
    os.write(descriptor, (json.dumps(name) + "\n").encode())
    return descriptor
