"""Stages in order, from the command line.

Importing this package ends the process in one sentence if another folder hides a package of this project: Python looks into
the working folder first, and `data` is a common name.
"""

import importlib.util
import sys
from pathlib import Path

HOME = Path(__file__).parents[1]
PACKAGES = ("configs", "data", "decoding", "draft_training", "evaluation", "nde_talf", "selector")


def hidden() -> str | None:
    """The sentence, or None where all packages are this project's own."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        where = Path(spec.origin or next(iter(spec.submodule_search_locations or [""]))) if spec else HOME / name
        where = where.parent if where.name == "__init__.py" else where
        if where.resolve() != HOME / name:
            return (
                f"{where} hides this project's own package `{name}` ({HOME / name}), because Python looks into the working "
                "folder first. Start the command from another folder, or use the command `nde`, which does not look there."
            )
    return None


if message := hidden():
    sys.exit(message)
