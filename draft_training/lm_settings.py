"""How a small language model is built and trained: the settings of `model.target_lm` and `model.draft_lm`."""

from dataclasses import dataclass
from typing import ClassVar

from decoding.common.errors import UserError
from draft_training.settings import TrainingConfig

OLD_PRESETS = {"model": {"tiny": "tiny1"}}
"""Presets of an earlier version, by group."""


@dataclass(kw_only=True)
class LanguageModelConfig(TrainingConfig):
    """A Llama and the recipe that trains it. Lengths are in tokens, batches in rows."""

    hidden: int = 192
    """Numbers of a hidden state."""
    layers: int = 12
    """Decoder layers."""
    heads: int = 3
    """Attention heads of a layer, which divide `hidden` into even parts."""
    intermediate: int = 512
    """Numbers between the two halves of a layer's MLP."""
    max_length: int = 2048
    """Longest context (max_position_embeddings)."""
    batch: int = 16
    """Rows in a step. The length of a row is that of the packed tokens."""
    warm_up: int = 20
    """Steps over which the learning rates rise linearly."""
    cool_down: float = 0.6
    """Fraction of the steps, at the end, over which the learning rates fall linearly to zero."""
    total_variation: float = 0.0
    """Weight of the total variation distance in the distillation loss. The rest is the KL divergence."""

    KEY: ClassVar[str] = "model.(target_lm|draft_lm)"
    POSITIVE: ClassVar[tuple[str, ...]] = ("hidden", "layers", "heads", "intermediate", "max_length", "steps", "batch")

    def __post_init__(self) -> None:
        """Raises UserError for a setting that cannot be."""
        super().__post_init__()
        if self.hidden % (2 * self.heads):
            raise UserError(f"{self.KEY}: hidden={self.hidden} does not make {self.heads} heads of an even size; change one.")
