"""The work of the commands, imported by name once their quick checks have passed.

A wrong key and --help are answered without torch, which takes seconds to import.
"""

from importlib import import_module
from typing import Any

WORK = {
    "run": "stages.run_stages",
    "dry_run": "commands.dry_run",
    "own_files": "config.own_files",
    "generate": "commands.stream",
    "check": "commands.compare_texts",
    "recommend": "commands.from_traces",
    "probe": "commands.probe",
}


def work_of(name: str) -> Any:
    """Import and return the module that does the work of a command."""
    return import_module(f"nde_talf.pipelines.{WORK[name]}")
