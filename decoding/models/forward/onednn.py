"""Products with large matrices by oneDNN, which torch has beside its own way.

plain:   torch's own way, MKL for float32 on x86. For one to eight rows it reads large weights at
         half of the memory's speed or less.
onednn:  oneDNN on the weights as they are.
packed:  oneDNN on a copy in its own order of blocks: one reading of the weights, whether for one
         row or for sixteen.

With `-many` behind its name a way is for two rows and more, and one row is multiplied plainly: on
an Intel Xeon that takes 84 ms a pass in place of 104.

`fastest` chooses by measuring; `python -m benchmarks.forward rows` shows all three.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.models.forward.fused_weights import (
    LARGE,
    LEAST,
    Apart,
    Linear,
    plain_linears,
)

if torch.backends.mkldnn.is_available():  # else torch has none of its operators
    _multiply = torch.ops.mkldnn._linear_pointwise.default

BLOCK = 64
"""Rows that oneDNN multiplies at once. More rows go in blocks, which is as fast."""
EXACT = 32
"""Up to so many rows are multiplied without padding.

oneDNN keeps about 2 MB of kernels for every number of rows, so 33 to 64 are padded to 40, 48, 56 or
64.
"""
LEAST_ROWS = 4
"""One to three rows are padded to so many for a large packed matrix, which is faster."""
PACKED_FOR = 8
"""Rows that the order of blocks is made for. It serves one row and a hundred as well."""


def has_onednn(dtype: torch.dtype = torch.float32) -> bool:
    """Return True if torch has oneDNN's linear layer for weights of this type.

    oneDNN takes bfloat16 on CPUs with AVX-512 alone.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    half = dtype == torch.bfloat16
    fits: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported() if half else dtype == torch.float32
    return fits


class OneDNNLinear(Linear):
    """A product by oneDNN on the weights as they are.

    Attributes:
        fewest: rows from which on oneDNN multiplies.
    """

    fewest = 1

    def __call__(self, states: Tensor) -> Tensor:
        """Multiply states [..., in] by the matrix and add the bias: [..., out].

        oneDNN's operation records no gradients and is not cast by autocast: then torch multiplies.
        """
        few = states.numel() < self.fewest * states.shape[-1]
        if few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return torch.cat([F.linear(states, part.weight, part.bias) for part in self.parts], -1)
        return in_blocks(states, self.weight, self.bias)


class PackedLinear(OneDNNLinear):
    """A product by oneDNN on a packed copy of the weights.

    The layers keep theirs, which after loading are pages of a file that need no memory.
    """

    def __init__(self, parts: Sequence[nn.Module]):
        self.parts = plain_linears(parts)
        weights = [part.weight.detach() for part in self.parts]
        biases = [part.bias.detach() for part in self.parts if part.bias is not None]
        self.weight = packed(weights[0] if len(weights) == 1 else torch.cat(weights))
        self.bias = torch.cat(biases) if biases else None
        self.samples = [each.flatten()[:: max(1, each.numel() // 16)] for each in weights]
        self.samples += biases


def packed(weight: Tensor) -> Tensor:
    """Copy a matrix into oneDNN's order of blocks, which oneDNN alone can read."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    return copy


def in_blocks(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply states [..., in] by a matrix as oneDNN does, packed or not: [..., out]."""
    rows = states if states.dim() == 2 else states.reshape(-1, states.shape[-1])
    count = rows.shape[0]
    if count <= EXACT and (count >= LEAST_ROWS or weight.numel() < LARGE or not weight.is_mkldnn):
        together: Tensor = _multiply(rows, weight, bias, "none", [], "")
    else:
        products = []
        for block in rows.split(BLOCK):
            more = -len(block) % (8 if len(block) > LEAST_ROWS else LEAST_ROWS)
            padded = F.pad(block, (0, 0, 0, more)) if more else block
            products.append(_multiply(padded, weight, bias, "none", [], "")[: len(block)])
        together = products[0] if len(products) == 1 else torch.cat(products)
    return together if states.dim() == 2 else together.view(*states.shape[:-1], -1)


def linear(parts: Sequence[nn.Module], way: str = "plain", moves: bool = True) -> Linear | Apart:
    """Make the product for linear layers, in one of the ways above.

    moves: weights may be moved in memory, side by side.
    """
    if not moves and len(parts) > 1:
        return Apart([linear([part], way) for part in parts])
    if way == "plain" or sum(part.weight.numel() for part in plain_linears(parts)) < LEAST:
        return Linear(parts)
    kind, _, many = way.partition("-")
    product = PackedLinear(parts) if kind == "packed" else OneDNNLinear(parts)
    product.fewest = 2 if many else 1
    return product
