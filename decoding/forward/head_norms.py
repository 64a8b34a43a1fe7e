"""Norms of queries and keys, head by head (Qwen 3, Gemma 3)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.forward.layer import FusedPart, Norm


class HeadNorms(FusedPart):
    """Norms of query heads and of key heads in one, for states [..., heads + shared, D].

    Each head is divided by its size and multiplied by its row of weights.
    """

    def __init__(self, queries: Norm, keys: Norm, heads: int, shared: int):
        self.eps, self.wide = queries.eps, queries.wide
        each = (queries, heads), (keys, shared)
        self.weight = torch.cat([norm.weight.expand(count, -1) for norm, count in each])
        rows = self.weight.split([heads, shared])
        self.copies = [
            (own, norm.own.expand(count, -1)) for own, (norm, count) in zip(rows, each, strict=True)
        ]
        super().__init__([self.weight])

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise states [..., heads + shared, D] head by head."""
        divided = (
            F.rms_norm(states.float() if self.wide else states, states.shape[-1:], None, self.eps)
            * self.weight
        )
        return divided.to(states.dtype) if self.wide else divided
