"""The manifest of a finished stage: its settings, its inputs, the checksums of its files, and its
identity.

Later stages remember an earlier one by its identity, which is a hash of its settings and of its
files' checksums. Seconds, dates and metrics are in the manifest but not in the identity, so that a
change to them makes nothing again.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from nde_talf.data.traces.store import INDEX
from nde_talf.decoding.common.card import CARD
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import SEAL, checksum, content_digest, read_json, write_sealed
from nde_talf.decoding.common.formats import Format
from nde_talf.decoding.common.progress import console

MANIFEST = "manifest.json"
BEGUN = "begun.json"
WORKING = ("training", "curves", "drawn", "answers", "variants")
"""Folders of a stage that it resumes from, or that are only looked at.

No later stage reads them.
"""
LARGE = 2 << 30
"""Size in bytes from which on a file is known by its size and its ends, and not by all of it."""

_said: set[Path] = set()


UPGRADES = {1: lambda content: {**content, "artefacts": None}}


class Manifest(TypedDict):
    """Content of `manifest.json`, see `write_manifest`. artefacts: None in format 1, from before
    checksums.
    """

    settings: dict[str, Any]
    inputs: dict[str, str]
    artefacts: dict[str, str] | None
    seconds: float
    finished: NotRequired[str]


FORMAT = Format(
    "manifest", 2, 2, "redo the stage with force=true", UPGRADES, absent=1, kind=Manifest
)


def artefacts(folder: Path) -> dict[str, str]:
    """Checksums of what a stage made, by path.

    A trace store is known by its index, which holds the checksums of the shards.
    """
    found = {}
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        ours = (
            path.name in (MANIFEST, BEGUN, CARD)
            or path.parts[0] in WORKING
            or any(part.startswith(".") for part in path.parts)
        )
        shard = path.suffix == ".parquet" and (file.parent / INDEX).exists()
        if file.is_file() and not ours and not shard:
            found[str(path)] = digest(file)
    return found


def digest(file: Path) -> str:
    """SHA-256 of a file; of a large one, of its size, its first and its last MiB."""
    size = file.stat().st_size
    if size < LARGE:
        return file_digest(file)
    with file.open("rb") as stream:
        first = stream.read(1 << 20)
        stream.seek(-(1 << 20), 2)
        return "ends " + content_digest([size, first.hex(), stream.read().hex()])


def identity(manifest: dict[str, Any]) -> str:
    """The hash of what was made and of the settings it was made with."""
    return content_digest([manifest["settings"], manifest["artefacts"]])


def _core(manifest: dict[str, Any]) -> str:
    """The hash of everything that must not change in a manifest."""
    return content_digest(
        [manifest[name] for name in ("settings", "inputs", "artefacts", "identity")]
    )


def write_manifest(folder: Path, wanted: dict[str, Any], metrics: Any, seconds: float) -> None:
    """Mark a stage as finished. wanted: its settings and the identities of its inputs."""
    content = {"format": FORMAT.number, **wanted, "artefacts": artefacts(folder)}
    content["identity"] = identity(content)
    content["core"] = _core(content)
    content |= {
        "metrics": plain(metrics),
        "seconds": seconds,
        "finished": datetime.now(UTC).isoformat(),
    }
    write_sealed(folder / MANIFEST, content)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a finished stage; an older format is upgraded.

    Where its seconds, dates or metrics were changed by hand, a notice says so.

    Raises:
        UserError: its settings, inputs or checksums were changed.
    """
    path = folder / MANIFEST
    content = read_json(path, again=FORMAT.again)
    number = FORMAT.number_of(content, path)
    content = FORMAT.upgraded(content, path, notice=False)
    if number < FORMAT.checked:
        if SEAL in content or "core" in content:
            raise UserError(
                f"{path}: it names an older format and has a checksum, so it was damaged:"
                f" {FORMAT.again}."
            )
        return {**content, "artefacts": artefacts(folder)}  # from before checksums: as they are
    seal = content.pop(SEAL, None)
    try:
        intact = identity(content) == content["identity"] and _core(content) == content["core"]
    except (KeyError, TypeError):
        intact = False
    if not intact:
        raise UserError(
            f"{path}: what it says of the files and settings is not as it was written, so nobody"
            f" can tell whether they are. Take a good copy of it, or {FORMAT.again}."
        )
    if seal != content_digest(content) and path not in _said:
        _said.add(path)
        console.print(
            f"! {path}: its seconds, date or metrics were changed by hand; the files were not"
        )
    return content


def faults(folder: Path, manifest: dict[str, Any]) -> dict[str, str]:
    """What is wrong with a finished stage's files, by path."""
    found = {}
    for name, expected in manifest["artefacts"].items():
        if not (folder / name).is_file():
            found[name] = "it is missing"
        elif digest(folder / name) != expected:
            found[name] = "it is not as it was written: its checksum is another"
    return found


def is_of(found: dict[str, Any], folders: dict[str, Path], identities: dict[str, str]) -> bool:
    """Whether a manifest, or what a stage began with, names these inputs.

    Those of format 1 name an earlier stage by the bytes of its manifest.
    """
    if set(found["inputs"]) != set(identities):
        return False
    return all(
        found["inputs"][name] in (identities[name], checksum(folders[name] / MANIFEST))
        for name in identities
    )


def plain(value: Any) -> Any:
    """`value`, which may contain dataclasses, as it reads back from JSON."""
    return json.loads(json.dumps(value, default=asdict))
