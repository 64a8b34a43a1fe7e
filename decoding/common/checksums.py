"""Checksums of a folder's files, in the folder itself.

They reveal a flipped bit or a file of another export. `checksums.json` names every file of the
folder with its SHA-256. What the project exports (a selector, a head, a trained model) has one
and is checked against it at every load. Folders of others have none and are not checked here.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from typing_extensions import TypedDict

from nde_talf.decoding.common.card import CARD
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import opened, write_atomically
from nde_talf.decoding.common.json_validation import typed

CHECKSUMS = "checksums.json"
FORMAT = 1
READ = (".json", ".jinja", ".safetensors", ".bin", ".model", ".txt", ".py")
"""Endings of what loaders of models, tokenizers and exports read."""


class _Checksums(TypedDict):
    format: int
    files: dict[str, str]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with opened(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def short_hash(text: str) -> str:
    """Return the first digits of a text's SHA-256, by which texts and conversations are named."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_checksums(folder: Path) -> None:
    """Enter every file of `folder`, but for its model card, in its `checksums.json`."""
    names = added(folder, [])
    content = {"format": FORMAT, "files": {name: file_digest(folder / name) for name in names}}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=2) + "\n")


def write_export(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the files of `folder`, and add checksums, all or nothing.

    An older export there is replaced.

    Raises:
        UserError: the folder holds what no export wrote.
    """

    def export(temporary: Path) -> None:
        temporary.mkdir(parents=True)
        write(temporary)
        write_checksums(temporary)

    listed = _listed(folder)
    if others := added(folder, listed) or [each.name for each in folder.glob("*") if not listed]:
        raise UserError(
            f"{folder}: it holds {others[0]}, which no export wrote, and a new export would take"
            " its place. Give another folder."
        )
    write_atomically(folder, export)


def added(folder: Path, listed: Iterable[str]) -> list[str]:
    """Return the files of a folder that its checksums do not list, but for model cards."""
    known = {*listed, CHECKSUMS}
    files = (file for file in folder.rglob("*") if not file.is_dir() and file.name != CARD)
    names = (str(file.relative_to(folder)) for file in files)
    return sorted(name for name in names if name not in known)


def check_checksums(folder: Path, name: str = "", again: str = "make it again") -> bool:
    """Check a folder against its checksums; return False if it has none.

    A file that loaders may read (READ) and that the checksums do not list is a fault too.

    Args:
        folder: an exported folder.
        name: text before the folder in an error, such as "model.target=".
        again: what a person can do about a damaged folder.

    Raises:
        UserError: a file is not as it was written; the message names it.
    """
    if not (folder / CHECKSUMS).exists():
        return False
    listed = _listed(folder, name, again)
    for file, expected in listed.items():
        if not (folder / file).is_file():
            raise UserError(f"{name}{folder}: {file} is missing. Take a good copy, or {again}.")
        if file_digest(folder / file) != expected:
            raise UserError(
                f"{name}{folder}: {file} is not as it was written: its checksum is another. It was"
                f" damaged, or comes from another export. Take a good copy, or {again}. If it was"
                f" changed on purpose, delete {CHECKSUMS}."
            )
    for file in added(folder, listed):
        if file.endswith(READ) and not any(part.startswith(".") for part in Path(file).parts):
            raise UserError(
                f"{name}{folder}: {file} was not there when it was written. Remove it, or, if it"
                f" was added on purpose, delete {CHECKSUMS}."
            )
    return True


def _listed(folder: Path, name: str = "", again: str = "make it again") -> dict[str, str]:
    """Return the digests in a folder's `checksums.json`, by file; none if it is not there."""
    try:
        with opened(folder / CHECKSUMS) as stream:
            content = typed(json.loads(stream.read()), _Checksums)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{name}{folder}: its {CHECKSUMS} is damaged ({error}). Take a good copy, or {again}."
        ) from error
    if content["format"] != FORMAT:
        raise UserError(
            f"{name}{folder}: its {CHECKSUMS} is of format {content['format']}, and this version"
            f" reads {FORMAT}."
        )
    return content["files"]
