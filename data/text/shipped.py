"""The pair that ships with the project: its name and where it is. Imports no torch."""

from pathlib import Path

from nde_talf.decoding.common.errors import UserError

SMALL = "small"
"""The name of the shipped pair, which no run takes."""
SHIPPED = Path(__file__).parents[2] / "checkpoints" / SMALL
TARGET, DRAFT, HEAD = "target", "draft", "head"
AGAIN = "take it from the repository or install the package again"


def shipped(part: str, folder: Path = SHIPPED) -> str:
    """Return the path of a part of the shipped pair, such as "target".

    Raises:
        UserError: it is missing.
    """
    if not (folder / part).exists():
        raise UserError(f"{folder / part}: this part of the shipped pair is missing; {AGAIN}.")
    return str(folder / part)


def is_shipped(target: str | None) -> bool:
    """Tell whether a target's path is that of the shipped pair."""
    return target is not None and Path(target).resolve() == (SHIPPED / TARGET).resolve()
