"""Manifest of a finished stage: settings, inputs, checksums of its files, and identity.

Later stages remember an earlier one by its identity, which is a hash of its settings and of its
files' checksums.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from nde_talf.data.text.shipped import portable
from nde_talf.data.traces.store import INDEX
from nde_talf.decoding.common.card import CARD
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError, masked
from nde_talf.decoding.common.files import content_digest, write_sealed
from nde_talf.decoding.common.formats import Format

MANIFEST = "manifest.json"
BEGUN = "begun.json"
WORKING = ("training", "curves", "trajectories", "answers")
"""Folders of a stage that it resumes from, or that are only looked at.

No later stage reads them.
"""


class Begun(TypedDict):
    """Content of `begun.json`: settings and inputs of an unfinished stage."""

    settings: dict[str, Any]
    inputs: dict[str, str]


class Manifest(Begun):
    """Content of `manifest.json`, see `write_manifest`."""

    artefacts: dict[str, str]
    seconds: float
    metrics: Any
    finished: str


FORMAT = Format("manifest", "redo the stage with force=true", Manifest)


def artefacts(folder: Path) -> dict[str, str]:
    """Return checksums of what a stage made, by path.

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
            found[str(path)] = file_digest(file)
    return found


def identity(manifest: dict[str, Any]) -> str:
    """Hash what was made and the settings it was made with."""
    return content_digest([manifest["settings"], manifest["artefacts"]])


def write_manifest(folder: Path, wanted: dict[str, Any], metrics: Any, seconds: float) -> None:
    """Mark a stage as finished. wanted: its settings and the identities of its inputs."""
    content = {
        "format": FORMAT.number,
        **wanted,
        "artefacts": artefacts(folder),
        "metrics": plain(metrics),
        "seconds": seconds,
        "finished": datetime.now(UTC).isoformat(),
    }
    write_sealed(folder / MANIFEST, content)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a finished stage.

    Raises:
        UserError: it was changed since it was written, or is of another format.
    """
    return FORMAT.load(folder / MANIFEST)


def check_files(folder: Path, manifest: dict[str, Any], stage: str) -> None:
    """Raise UserError that names the files of a finished stage that are not as they were."""
    broken = []
    for name, expected in manifest["artefacts"].items():
        if not (folder / name).is_file():
            broken.append(f"{folder / name}: it is missing")
        elif file_digest(folder / name) != expected:
            broken.append(f"{folder / name}: it is not as it was written: its checksum is another")
    if broken:
        raise UserError(
            f"{'; '.join(broken)}. Put a good copy in its place, or redo it with stage={stage}"
            " force=true."
        )


def plain(value: Any) -> Any:
    """Return `value` as it reads back from JSON, in any checkout and without secrets.

    It may contain dataclasses. NaN and infinity, which JSON has not, become None.
    """
    text = portable(masked(json.dumps(value, default=asdict, ensure_ascii=False)))
    return json.loads(text, parse_constant=lambda _: None)
