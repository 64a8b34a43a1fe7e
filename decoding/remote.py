"""A model on one device that is called from another: a draft with a GPU of its own.

Example: the target is on cuda:0 and the draft on cuda:1. Policies, verification and sampling are on
cuda:0. They pass tokens and masks to the draft, and get its hidden states and logits on cuda:0. Its
weights and its key/value cache stay on cuda:1.
"""

import torch
from torch import Tensor

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.model import CausalModel


class RemoteModel(CausalModel):
    """A `CausalModel` whose inputs and outputs are on the device of its caller. See `call_from`."""

    def call_from(self, device: torch.device) -> None:
        """Take inputs from `device`, and return hidden states and logits there.

        The weights stay where they are.
        """
        self.device = device

    def hidden(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """See `CausalModel.hidden`."""
        own, blocked = self._own, None if mask is None else mask.to(self._own)
        return super().hidden(tokens.to(own), positions.to(own), blocked, cache).to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel.logits`."""
        return super().logits(hidden.to(self._own)).to(self.device)

    @property
    def _own(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device
