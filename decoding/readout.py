"""Readout of logits from hidden states: lm_head, and a family's operations after it.

Llama, Qwen:  W h
Granite:      W h / 8            logits_scaling = 8 in its configuration
Cohere:       W h * 0.0625       logit_scale = 0.0625
Gemma 2:      30 tanh(W h / 30)  final_logit_softcapping = 30
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")


def optional(owner: Any, name: str, default: Any = None) -> Any:
    """Read a field that not every transformers configuration or module has."""
    return getattr(owner, name, default)


@dataclass(frozen=True)
class Readout:
    """Logits of hidden states: c tanh(s (W h + b) / c), or s (W h + b) without a cap.

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


def scale_and_cap(config: "PretrainedConfig") -> tuple[float, float | None]:
    """A `Readout`'s scale and cap, as a model's text configuration says."""
    scale = 1.0
    for name in _FACTORS:
        scale *= optional(config, name) or 1.0
    for name in _DIVISORS:
        divisor = optional(config, name) or 1.0
        scale = (
            scale * divisor if config.model_type == "hyperclovax" else scale / divisor
        )  # its logits_scaling is a factor
    return scale, optional(config, "final_logit_softcapping")
