"""Weights of linear layers over one input, fused into one matrix without a second copy."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGE = 1 << 19
"""Numbers in a large matrix. Its product with a few rows takes as long as reading it."""


LEAST = 1 << 15
"""Numbers in the smallest matrix that oneDNN may multiply. Below, its calls cost too much."""


class NotNativeError(Exception):
    """A model has no native forward pass; the message says why."""


def plain_linears(parts: Sequence[nn.Module]) -> "Sequence[nn.Linear]":
    """Return `parts`. Raises NotNativeError for all but plain linear layers of floating point.

    All of them have a bias, or none has.
    """
    for part in parts:
        if type(part) is not nn.Linear or not isinstance(part.weight, nn.Parameter):
            raise NotNativeError(f"a linear layer is of type {type(part).__name__}")
        weight = part.weight.data
        if type(weight) is not Tensor or not weight.is_floating_point() or weight.itemsize == 1:
            raise NotNativeError(
                f"the weights of a linear layer are {type(weight).__name__}s of {weight.dtype}"
            )
    linears = cast("Sequence[nn.Linear]", parts)
    if len({part.bias is None for part in linears}) > 1:
        raise NotNativeError("of linear layers over one input, some have a bias and some have none")
    return linears


def fused(parts: Sequence[Tensor]) -> Tensor:
    """Stack parameters [rows, ...] in one tensor, of which they become views."""
    first, sizes = parts[0], [len(part) for part in parts]
    if len(parts) == 1:
        return first.detach()
    if _in_line(parts):  # they are views of one already
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    together = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, together.split(sizes), strict=True):
        part.data = view
    return together


def _in_line(parts: Sequence[Tensor]) -> bool:
    """Return True if each part begins where the one before it ends, in one piece of memory."""
    ends = [part.data_ptr() + part.nbytes for part in parts]
    return (
        [part.data_ptr() for part in parts[1:]] == ends[:-1]
        and all(part.is_contiguous() for part in parts)
        and len({part.untyped_storage().data_ptr() for part in parts}) == 1
    )


class FusedPart:
    """Weights of a part of a model, as a native pass uses them.

    Attributes:
        tensors: the weights that are used, as far as torch can read them.
        copies: (the weights that are used, the module's) where the first are no view of the
            second.
        samples: a few numbers of each matrix that was packed, as views of the module's own.
    """

    tensors: Sequence[Tensor] = ()
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    samples: Sequence[Tensor] = ()


class Linear(FusedPart):
    """One product for several linear layers over the same input.

    Raises NotNativeError for layers that are not plain.

    Their weights become views of the fused one, so that there is no second copy, and a change in
    place is seen here.

    """

    def __init__(self, parts: Sequence[nn.Module]):
        self.parts = plain_linears(parts)
        biases = [part.bias for part in self.parts if part.bias is not None]
        self.weight = fused([part.weight for part in self.parts])
        self.bias = fused(biases) if biases else None
        self.tensors = [each for each in (self.weight, self.bias) if each is not None]

    def __call__(self, states: Tensor) -> Tensor:
        """Multiply states [..., in] by the matrix and add the bias: [..., out]."""
        return F.linear(states, self.weight, self.bias)


class Apart(FusedPart):
    """Products of somebody else's linear layers over one input, whose weights stay in place."""

    def __init__(self, products: "Sequence[Linear | Apart]"):
        self.products = products
        self.tensors = [each for product in products for each in product.tensors]

    def __call__(self, states: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        return torch.cat([product(states) for product in self.products], -1)
