"""Files that are either whole or absent: temporary name first, then an atomic rename; and their checksums."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from decoding.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file or folder under a temporary name beside `path`, then put it in its place.

    Nothing half-written is ever left under `path`. A full disk is a UserError that names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)
    try:
        write(temporary)
        if path.is_dir():
            remove(path)
        os.replace(temporary, path)
    except OSError as error:
        remove(temporary)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{path}: the disk is full. Free some space (or set paths.checkpoints to another disk) and run the same "
                "command again; everything finished so far is kept."
            ) from error
        raise
    except BaseException:
        remove(temporary)
        raise


def write_json(path: Path, content: object) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


def read_json(path: Path) -> dict:
    """Raises UserError naming `path` if it is missing or no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: it cannot be read as JSON ({error}). Delete it and make it again.") from error


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files in order of name."""
    digest = hashlib.sha256()
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(str(file.relative_to(path)).encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
