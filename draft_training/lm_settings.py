"""How a small language model is built and trained: the settings of `model.target_lm` and
`model.draft_lm`.
"""

from dataclasses import dataclass
from typing import ClassVar

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.schema import MANY, number
from nde_talf.draft_training.settings import TrainingConfig


@dataclass(kw_only=True)
class LanguageModelConfig(TrainingConfig):
    """A Llama and the recipe that trains it. Lengths are in tokens, batches in rows."""

    hidden: int = number(192, 2, 65_536)
    """Numbers of a hidden state."""
    layers: int = number(12, 1, 1000)
    """Decoder layers."""
    heads: int = number(3, 1, 1024)
    """Attention heads of a layer, which divide `hidden` into even parts."""
    intermediate: int = number(512, 1, 1_000_000)
    """Numbers between the two halves of a layer's MLP."""
    max_length: int = number(2048, 2, 10_000_000)
    """Longest context (max_position_embeddings)."""
    batch: int = number(16, 1, 4096)
    """Rows in a step. The length of a row is that of the packed tokens."""
    warm_up: int = number(20, 0, MANY)
    """Steps over which the learning rates rise linearly."""
    cool_down: float = number(0.6, 0, 1)
    """Fraction of the steps, at the end, over which the learning rates fall linearly to zero."""
    total_variation: float = number(0.0, 0, 1)
    """Weight of the total variation distance in the distillation loss.

    The rest is the KL divergence.
    """

    KEY: ClassVar[str] = "model.(target_lm|draft_lm)"

    def __post_init__(self) -> None:
        """Raises UserError for a setting that cannot be."""
        super().__post_init__()
        if self.hidden % (2 * self.heads):
            raise UserError(
                f"{self.KEY}: hidden={self.hidden} does not make {self.heads} heads of an even"
                " size; change one."
            )
