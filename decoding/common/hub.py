"""Exports on a hub, read by name as from a folder."""

from collections.abc import Sequence
from pathlib import Path

from nde_talf.decoding.common.card import hub_name
from nde_talf.decoding.common.errors import UserError, first_line

FILES = ("*.json", "*.safetensors", "*.bin")
"""Files that loaders of exports read."""


def export_folder(where: str | Path, files: Sequence[str] = FILES) -> Path:
    """Return the folder of a head or selector: the given one, or the snapshot of ORG/NAME.

    Raises UserError where there is no such folder, and the hub has none either.
    """
    name = hub_name(str(where))
    if name is None:
        return Path(where)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*files]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: there is no such folder, and the hub gives none ({first_line(error)})."
        ) from error
