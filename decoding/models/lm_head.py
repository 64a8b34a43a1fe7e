"""Readout of a causal language model: from final hidden states to logits."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Readout:
    """Logits of hidden states: c tanh(s (W h + b) / c), or s (W h + b) without a cap.

    Llama, Qwen:  W h
    Granite:      W h / 8            logits_scaling = 8 in its configuration
    Cohere:       W h * 0.0625       logit_scale = 0.0625
    Gemma 2:      30 tanh(W h / 30)  final_logit_softcapping = 30

    Attributes:
        weight: W, [V, H].
        bias: b, [V]; None in nearly all models.
        scale: s.
        cap: c; None: logits are not capped.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        return self.finish(F.linear(hidden, self.weight, self.bias))

    def finish(self, products: Tensor) -> Tensor:
        """Logits of the products W h + b [..., V], which are overwritten."""
        factor = self.scale / (self.cap or 1.0)
        logits = products if factor == 1 else products.mul_(factor)
        if self.cap is None:
            return logits
        logits = logits.tanh_()
        return torch.mul(logits, self.cap, out=None if logits.requires_grad else logits)
