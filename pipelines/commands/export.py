"""Lay out what one uploads of a run: `nde export run=NAME to=FOLDER`.

Each head and selector becomes a folder with its weights, test vectors, checksums and model card.
"""

import shutil
from collections.abc import Iterator
from dataclasses import field
from functools import partial
from pathlib import Path

from nde_talf.decoding.common.card import CARD
from nde_talf.decoding.common.checksums import check_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_atomically
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import Folder, Text, settings
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.schema import PathsConfig
from nde_talf.pipelines.runs.finished import Run


@settings()
class ExportConfig:
    """A run, and where its exports go."""

    run: Text = "default"
    """Name of a finished run, its folder under paths.checkpoints."""
    to: Folder = "export"
    """Folder that gets a folder for the head and for each selector; none of them may be there."""
    paths: PathsConfig = field(default_factory=PathsConfig)


def export(config: ExportConfig) -> None:
    """Copy the run's exports, checked, and print how they are uploaded.

    Raises UserError where there are none, one is damaged, or its place is taken.
    """
    exports = dict(_exports(Run(config.run, config.paths.checkpoints)))
    if not exports:
        raise UserError(
            f"run={config.run}: it has no head and no selector; make them with stage=draft and"
            " stage=selector."
        )
    for name, folder in exports.items():
        place = Path(config.to) / name
        if place.exists():
            raise UserError(f"to={config.to}: {place} is there already. Give another folder.")
        check_checksums(folder)
        write_atomically(place, partial(shutil.copytree, folder))
        console.print(
            f"{place}: read its {CARD}, then: hf upload YOUR_NAME/{config.run}-{name} {place}"
        )


def _exports(run: Run) -> Iterator[tuple[str, Path]]:
    head = run.stage("draft") / "export"
    if head.is_dir():
        yield "head", head
    for name in run.selectors():
        yield f"selector-{name}", run.stage("selector") / "export" / name


def main() -> None:
    """The command `nde export`."""
    launch("export", ExportConfig, export)


if __name__ == "__main__":
    main()
