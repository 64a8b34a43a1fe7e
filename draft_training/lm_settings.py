"""Settings of `model.target_lm` and `model.draft_lm`: a small language model and its training."""

from typing import Annotated, ClassVar

from pydantic import Field

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import Batch, Natural, Number, settings
from nde_talf.draft_training.settings import TrainingConfig


@settings("model.(target_lm|draft_lm)", kw_only=True)
class LanguageModelConfig(TrainingConfig):
    """A Llama and the recipe that trains it. Lengths are in tokens, batches in rows."""

    hidden: Annotated[int, Field(ge=2, le=65_536)] = 192
    """Numbers of a hidden state."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 12
    """Decoder layers."""
    heads: Annotated[int, Field(ge=1, le=1024)] = 3
    """Attention heads of a layer, which divide `hidden` into even parts."""
    intermediate: Number = 512
    """Numbers between the two halves of a layer's MLP."""
    max_length: Annotated[int, Field(ge=2, le=10_000_000)] = 2048
    """Longest context (max_position_embeddings)."""
    batch: Batch = 16
    """Rows in a step. The length of a row is that of the packed tokens."""
    warm_up: Natural = 20
    """Steps over which the learning rates rise linearly."""

    tied: ClassVar[bool] = False
    """Use the embeddings as the output layer too."""

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise UserError(
                f"model.(target_lm|draft_lm): hidden={self.hidden} does not make {self.heads} heads"
                " of an even size; change one."
            )
