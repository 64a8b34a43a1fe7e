"""The command that last worked on a run, kept in its folder: reports show it, and `generate` finds the run's base by it."""

import shlex
import sys
from pathlib import Path

from decoding.common.files import read_json, write_json

FILE = "command.json"


def remember(run: Path, base: str | None) -> None:
    """Write this process's command line into the folder of a run."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("hydra.")]
    write_json(run / FILE, {"command": shlex.join(["python", "-m", "pipelines.run", *arguments]), "base": base})


def remembered(run: Path) -> dict[str, str | None]:
    """{"command": ..., "base": ...} of a run; empty for one of an earlier version."""
    return read_json(run / FILE) if (run / FILE).exists() else {}
