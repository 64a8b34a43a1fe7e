"""Schema of a selector: its models, rule and sampling settings."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from nde_talf.decoding.common.arguments import Positive, Proper
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import Amount, Share
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.verifier import Verifier


def selectable(name: str, where: str) -> Verifier:
    """Return the rule called `name`, if a selector can choose trees for it.

    Raises:
        UserError: naming the key or file `where`, for a rule that is not lossless on every delayed
            tree at every temperature.
    """
    fitting = [
        name for name, rule in VERIFIERS.items() if "delayed" in rule.trees and name != "greedy"
    ]
    if name not in fitting:
        why = "it does not take the 'delayed' trees that a selector drafts"
        if name not in VERIFIERS:
            why = "there is none of that name"
        elif name == "greedy":
            why = "it is lossless at temperature 0 only, where every rule decodes greedily"
        raise UserError(
            f"{where}: a selector cannot choose trees for {name}: {why}."
            f" Choose from {', '.join(fitting)}."
        )
    return VERIFIERS[name]


Setting = tuple[Annotated[float, Field(ge=0)], Share]
"""Temperature and top-p."""


@dataclass(frozen=True)
class SelectorSchema:
    """Models, rule and settings of a selector.

    Raises UserError for a verifier that does not take delayed trees. Ranges are checked when an
    export is read.

    Attributes:
        target_hidden: size of the target's hidden states.
        draft_hidden: size of the draft's hidden states.
        verifiers: one rule, whose trees it chooses.
        settings: (temperature, top-p) of its training.
        learned: for each setting, whether the network chooses; if not, choosing did not win in
            cross-validation, and the best static action is taken.
        sharpness: see `Selector`.
        width: of the projections of the hidden states.
        hidden: widths of the two hidden layers.
        dropout: in training, after each of them.
        pricing: "table", or "eq11", see `StepCosts`.
    """

    target_hidden: Positive
    draft_hidden: Positive
    verifiers: tuple[str]
    settings: tuple[Setting, ...]
    learned: tuple[bool, ...]
    sharpness: Amount = 20.0
    width: Positive = 128
    hidden: tuple[Positive, Positive] = (512, 32)
    dropout: Proper = 0.1
    pricing: Annotated[str, Field(pattern="^(table|eq11)$")] = "table"

    def __post_init__(self) -> None:
        selectable(self.verifier, "selector")
        if not 0 < len(self.settings) == len(self.learned):
            raise ValueError("'settings' and 'learned' are not of one length, above 0")
        if len({*self.settings}) < len(self.settings):
            raise ValueError("one of 'settings' is there twice")

    @property
    def verifier(self) -> str:
        """Name of the rule."""
        return self.verifiers[0]
