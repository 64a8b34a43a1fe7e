"""The pair that ships with the project, laid out like a finished run. Imports no torch."""

from pathlib import Path

from nde_talf.decoding.common.errors import UserError

SMALL = "small"
"""The name of the shipped pair, which no run takes."""
SHIPPED = Path(__file__).parents[2] / "checkpoints" / SMALL
TARGET, DRAFT = "target", "draft"
PORTABLE = "shipped:"
"""Begins a place in the shipped folder where it is recorded: a checkout may lie elsewhere."""
AGAIN = "take it from the repository or install the package again"


def shipped(role: str, folder: Path = SHIPPED) -> str:
    """Return the path of the shipped "target" or "draft".

    Raises:
        UserError: it is missing.
    """
    path = folder / "pair" / role
    if not path.exists():
        raise UserError(f"{path}: this part of the shipped pair is missing; {AGAIN}.")
    return str(path)


def portable(text: str) -> str:
    """Write places in the shipped folder as every checkout can read them.

    >>> portable(str(SHIPPED / "pair"))
    'shipped:pair'
    """
    return text.replace(f"{SHIPPED}/", PORTABLE)


def is_shipped(target: str | None) -> bool:
    """Tell whether a target's path is the shipped pair's."""
    return target is not None and Path(target).resolve() == (SHIPPED / "pair" / TARGET).resolve()
