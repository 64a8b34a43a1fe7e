"""EAGLE-3's draft head (Li et al. 2025, arXiv 2503.01840): features of a low, a middle and a high layer of the target, and an
lm_head of its own.

fc turns the three into one [H], in whose place the head's own output stands behind drafted tokens, before its final norm. The
decoder layer is Llama's, but its queries, keys and values read [norm(embedding), norm(feature)], and what attention is added
to is the feature alone. Layers, norms and what is fed back are those of vLLM's `llama_eagle3` (norm_before_residual and
norm_output off). It drafts from the target's whole vocabulary. It knows nothing of losses or files.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decoding.errors import UserError
from decoding.model import CausalModel
from draft_training.families import FAMILY, family_of
from draft_training.head import EagleHead

_FEATURE_SHARE = 0.3  # root mean square of a fresh head's fc output, for features of size 1


def three_layers(count: int) -> tuple[int, int, int]:
    """Behind how many of a target's `count` layers its features are taken: vLLM's default, 2, half and all but 3 of them; where
    these are not three layers in ascending order, 1, half and all but one, or 0, 1, 2 of fewer than four. Raises UserError for
    one layer."""
    if count < 2:
        raise UserError(f"draft.features=three: a target of {count} layer has no three features. Use draft.features=final.")
    if count >= 7:
        return 2, count // 2, count - 3
    return (1, count // 2, count - 1) if count >= 4 else (0, 1, 2)


class Eagle3Head(EagleHead):
    """A head for `target` on features of three of its layers, concatenated [..., 3H]. Its methods mean what `EagleHead`'s do.

    Output features are those before the final norm. Raises UserError also where the layer would not be Llama's.
    """

    kind = "eagle3"

    def __init__(self, target: CausalModel, layer: str = FAMILY):
        if (family := family_of(target, layer).name) != "llama":
            raise UserError(
                f"draft.features=three has a Llama layer, and {target.name} is of the family {family}. Use "
                "draft.layer=llama, or draft.features=final."
            )
        self.feature_layers = three_layers(target.layers)
        target.reader(self.feature_layers)
        super().__init__(target, layer)

    def _build(self, hidden: int, decoder: nn.Module) -> None:
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        attention = decoder.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            wide = nn.Linear(2 * hidden, getattr(attention, name).out_features, bias=False)
            setattr(attention, name, wide)
        decoder.hidden_norm = LlamaRMSNorm(hidden, self.config.rms_norm_eps)
        self.layers = nn.ModuleList([decoder])
        self.norm = LlamaRMSNorm(hidden, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, self.config.vocab_size, bias=False)

    def _initialise(self) -> None:
        # A head begins with the target's own readout, over features mixed at random.
        with torch.no_grad():
            for parameter in self.layers.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=getattr(self.target.config, "initializer_range", 0.02))
            self.fc.weight.normal_(std=_FEATURE_SHARE * self.fc.in_features**-0.5)
            self.lm_head.weight.copy_(self.target.lm_head.weight)

    @property
    def readout(self) -> Tensor:
        """See `EagleHead.readout`: of its own, trained."""
        return self.lm_head.weight

    def read(self, outputs: Tensor) -> Tensor:
        """See `EagleHead.read`: behind the final norm."""
        return self.norm(outputs)

    def combine(self, features: Tensor) -> Tensor:
        """See `EagleHead.combine`: [..., 3H] through fc."""
        return self.fc(features)

    def _entries(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        return torch.cat([layer.input_layernorm(self.embed(tokens)), layer.hidden_norm(features)], -1), features

    def _run_layer(self, entries: Tensor, residual: Tensor, how: dict[str, Any]) -> Tensor:
        return self._finish(residual, self.layers[0].self_attn(entries, **how)[0])
