"""Products of a pass's rows with weight matrices, in one of three ways.

plain:   torch's own, MKL for float32 on x86. For one to eight rows it reads large weights at half
         of the memory's speed or less.
onednn:  oneDNN on the weights as they are.
packed:  oneDNN on a copy in its own order of blocks: one reading of the weights, whether for one
         row or for sixteen.

`fastest` chooses by measuring; `python -m benchmarks.forward products` shows all three.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.forward.fusing import check_linear, fused_linear

LARGE = 1 << 19
"""Numbers in a matrix from which on it may be multiplied by oneDNN.

Smaller ones lie in the caches, where torch's own way is as fast.
"""
BLOCK = 64
"""Rows that oneDNN multiplies at once.

It keeps memory for every number of rows, so that prompts would fill it. More rows go in blocks,
which is as fast, and rows are filled up to 8, 16, 24 ... of them, or to 4 of packed weights, with
which one row alone is slower than four.
"""
PACKED_FOR = 8
"""Rows that the order of blocks is made for. It serves one row and a hundred as well."""


def has_onednn() -> bool:
    """Return True if torch has oneDNN's linear layer."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_large(module: nn.Module) -> bool:
    """Return True if a linear layer of `module` is large enough for oneDNN."""
    return any(
        type(part) is nn.Linear and part.weight.numel() >= LARGE for part in module.modules()
    )


def packed(weight: Tensor) -> Tensor:
    """Copy a matrix into oneDNN's order of blocks, which oneDNN alone can read."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    return copy


def in_blocks(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply states [..., in] by a matrix as oneDNN does, packed or not: [..., out]."""
    rows = states.reshape(-1, states.shape[-1])
    products = [_block(block, weight, bias) for block in rows.split(BLOCK)]
    together = products[0] if len(products) == 1 else torch.cat(products)
    return together.view(*states.shape[:-1], -1)


def _block(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count, few = len(rows), 4 if weight.is_mkldnn else 1
    more = -count % (few if count < 8 else 8)
    rows = F.pad(rows, (0, 0, 0, more)) if more else rows
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product[:count] if more else product


class Linear:
    """One product for several linear layers over the same input.

    In the ways plain and onednn their weights become views of the fused one, so that there is no
    second copy, and a change in place is seen here. Packed weights are a copy, and the layers keep
    theirs, which after loading are pages of a file that need no memory.

    Attributes:
        tensors: what is multiplied, without what oneDNN has packed.
        samples: a few numbers of each matrix that was packed, as views of the layers' own.
        copies: as a norm's; there are none.
    """

    copies: Sequence[tuple[Tensor, Tensor]] = ()

    def __init__(self, parts: Sequence[nn.Module], way: str = "plain"):
        self.parts = cast("Sequence[nn.Linear]", parts)
        self.fast = way != "plain" and sum(part.weight.numel() for part in self.parts) >= LARGE
        self.tensors: list[Tensor] = []
        self.samples: list[Tensor] = []
        if self.fast and way == "packed":
            check_linear(parts)
            weights = [part.weight.detach() for part in self.parts]
            biases = [part.bias.detach() for part in self.parts if part.bias is not None]
            together = weights[0] if len(weights) == 1 else torch.cat(weights)
            self.weight = packed(together)
            self.bias = torch.cat(biases) if biases else None
            self.samples = [each.flatten()[:: max(1, each.numel() // 16)] for each in weights]
            self.samples += biases
        else:
            self.weight, self.bias = fused_linear(parts)
            self.tensors = [each for each in (self.weight, self.bias) if each is not None]

    def __call__(self, states: Tensor) -> Tensor:
        """Multiply states [..., in] by the matrix and add the bias: [..., out]."""
        if not self.fast:
            return F.linear(states, self.weight, self.bias)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            # oneDNN's operation records no gradients and is not cast.
            return torch.cat([F.linear(states, part.weight, part.bias) for part in self.parts], -1)
        return in_blocks(states, self.weight, self.bias)
