"""Files that are complete or absent, and JSON with a checksum.

A file is written under a temporary name, synchronised to the disk, and then renamed atomically.
Each writer has its own temporary names, so that two processes never share one. `remove_temporaries`
removes what killed processes left. Nothing is written or removed through a link.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.errors import UserError, memory_is_short
from nde_talf.decoding.common.json_validation import typed

DISK = {
    errno.ENOSPC: "the disk is full. Free some space",
    errno.EDQUOT: "your share of the disk is full. Free some space",
    errno.EFBIG: "the file is larger than this disk or shell allows (ulimit -f). Raise that",
    errno.EIO: "the disk cannot be written to (input/output error). Mend it",
}
"""Errors of a disk, and what a person can do about each."""
SEAL = "sha256"
"""The key of a JSON file that holds the checksum of all its other keys."""

_TEMPORARY, _OLD = ".tmp", ".tmp.old"
_MADE = re.compile(r"\.(?P<name>.+)\.[0-9]+-[0-9a-f]{8}\.tmp(?P<old>\.old)?")
"""Names that `_beside` makes, and nobody else."""
_UMASK = os.umask(0)
os.umask(_UMASK)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file or folder under a temporary name, then move it to `path`.

    Nothing half-written is ever left under `path`, and what was there stays until the new one is
    complete and on the disk. Others may read the new one, as far as the umask allows.

    Args:
        path: the place of the finished file or folder.
        write: gets the temporary path and writes there.

    Raises:
        UserError: the disk is full or broken, or `path` is a link.
    """
    refuse_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path, _TEMPORARY)
    try:
        write(temporary)
        for part in [temporary, *(temporary.rglob("*") if temporary.is_dir() else ())]:
            part.chmod(part.stat().st_mode | (0o755 if part.is_dir() else 0o644) & ~_UMASK)
            _to_disk(part)
        replace(temporary, path)
    except BaseException as error:
        remove(temporary)
        if not isinstance(error, OSError) or error.errno not in DISK:
            raise
        raise disk_error(path, error.errno) from error


def disk_error(path: object, number: int) -> UserError:
    """Make the UserError for an error of a disk, `number` in `DISK`."""
    return UserError(
        f"{path}: {DISK[number]}, or set paths.checkpoints to another disk, and run the same"
        " command again; everything finished so far is kept."
    )


def replace(new: Path, path: Path) -> None:
    """Put the file or folder `new` in the place of `path`.

    A folder that was there is moved away, and removed afterwards. A kill between the two leaves it
    to `remove_temporaries`.
    """
    old = None
    if path.is_dir() and not path.is_symlink():
        old = _beside(path, _OLD)
        os.rename(path, old)
    os.replace(new, path)
    if old:
        remove(old)
    _to_disk(path.parent)


def _beside(path: Path, ending: str) -> Path:
    """Return a hidden name beside `path` that no other writer uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{ending}")


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk.

    Some file systems cannot report this for a folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EROFS):
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> list[str]:
    """Remove what killed writers left in `folder`, and follow no link; return the names.

    Call it only where no writer is at work.

    A folder that was about to be replaced when its writer was killed gets its name back.
    """
    removed = []
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if made := _MADE.fullmatch(name):
                left, path = Path(place, name), Path(place, made["name"])
                if made["old"] and not path.exists():
                    os.rename(left, path)
                else:
                    remove(left)
                    removed.append(str(left.relative_to(folder)))
    return removed


def refuse_links(folder: Path) -> None:
    """Raise UserError if `folder`, or anything in it, is a link."""
    refuse_link(folder)
    for path in folder.rglob("*"):
        refuse_link(path)


def refuse_link(path: Path) -> None:
    """Raise UserError for a link in place of a file or folder of ours."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a link to {os.readlink(path)}, and nothing is written or removed through a"
            " link. Put what it points to in its place, or remove the link."
        )


def opened(path: Path) -> BufferedReader:
    """Open a file to read it. Raises UserError for a pipe or device, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: it is no regular file. Put a file in its place.")
    return os.fdopen(descriptor, "rb")


def write_json(path: Path, content: object) -> None:
    """Write `content` to `path` as indented JSON, atomically."""
    write_atomically(
        path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n")
    )


def read_json(
    path: Path, kind: Any = dict[str, Any], again: str = "delete it and make it again"
) -> Any:
    """Read the content of a JSON file.

    Args:
        path: the file.
        kind: what it has to hold, as an annotation, see `typed`.
        again: what a person can do about a damaged file.

    Raises:
        UserError: it is missing, no JSON, or something else; the message names `path`.
    """
    with reading(path, again), opened(path) as stream:
        return typed(json.loads(stream.read()), kind)


@contextmanager
def reading(path: object, again: str) -> Iterator[None]:
    """Turn any error of a library that reads `path` inside the block into a UserError.

    See `unreadable` for its text. A UserError that is raised inside passes unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise unreadable(path, error, again) from error


def unreadable(path: object, error: BaseException, again: str) -> UserError:
    """Make the UserError for a file that `error` kept from being read.

    It reports that the memory is short, or what a person can do.
    """
    why = " ".join(str(error).split())[:300]
    why = (
        why
        if isinstance(error, (OSError, ValueError)) and why
        else f"{type(error).__name__}: {why}".removesuffix(": ")
    )
    if memory_is_short(error):
        return UserError(
            f"{path}: there is not enough memory to read it ({why}). The file may be fine: free"
            " some memory."
        )
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path}: it is missing. Take a good copy, or {again}.")
    return UserError(
        f"{path}: it cannot be read, or does not hold what it should ({why}). Take a good copy, or"
        f" {again}."
    )


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a checksum of its own content, which `read_sealed` checks."""
    plain = json.loads(json.dumps(content))
    write_json(path, {**plain, SEAL: content_digest(plain)})


def read_sealed(path: Path, again: str) -> dict[str, Any]:
    """Read what `write_sealed` wrote. again: what a person can do about a damaged file.

    Raises UserError naming `path`.
    """
    content = read_json(path, again=again)
    seal = content.pop(SEAL, None)
    if seal is None or seal != content_digest(content):
        raise UserError(
            f"{path}: it is not as it was written: its checksum is another. Take a good copy, or"
            f" {again}."
        )
    return content


def content_digest(content: object) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys and its white space."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def user_cache() -> Path:
    """Return the project's folder in the user's cache (XDG_CACHE_HOME, ~/.cache).

    Nothing can be written there if the user has no home.
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.devnull if cache[0] == "~" else cache, "nde-talf")


def model_cache() -> Path:
    """Return the folder of models that are kept for the user: in HF_HOME if that is set."""
    home = os.environ.get("HF_HOME")
    return Path(home).expanduser() / "nde-talf" if home else user_cache() / "models"


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
