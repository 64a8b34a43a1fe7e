"""Products of rows with weight matrices: those over one input become one, torch's or oneDNN's."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGE = 1 << 19
"""Numbers in a matrix from which on it may be multiplied by oneDNN.

Smaller ones lie in the caches, where torch's own way is as fast.
"""


class NotNativeError(Exception):
    """A model has no native forward pass; the message says why."""


def fused_linear(parts: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Fuse the weights and the biases of linear layers. Raises NotNativeError for other layers."""
    linears = plain_linears(parts)
    biases = [part.bias for part in linears if part.bias is not None]
    return fused([part.weight for part in linears]), fused(biases) if biases else None


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
    """Parameters [rows, ...] one below the other, of which they become views."""
    first, sizes = parts[0], [len(part) for part in parts]
    if _in_line(parts):  # they are views of one already
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    with torch.inference_mode(first.is_inference()), torch.no_grad():
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


class Linear:
    """One product for several linear layers over the same input.

    Their weights become views of the fused one, so that there is no second copy, and a change in
    place is seen here.

    Attributes:
        tensors: what is multiplied, as far as torch can read it.
        samples: a few numbers of each matrix that was packed, as views of the layers' own.
        copies: as a norm's; there are none.
    """

    samples: Sequence[Tensor] = ()
    copies: Sequence[tuple[Tensor, Tensor]] = ()

    def __init__(self, parts: Sequence[nn.Module]):
        self.weight, self.bias = fused_linear(parts)
        self.tensors = [each for each in (self.weight, self.bias) if each is not None]

    def __call__(self, states: Tensor) -> Tensor:
        """Multiply states [..., in] by the matrix and add the bias: [..., out]."""
        return F.linear(states, self.weight, self.bias)


def linear(parts: Sequence[nn.Module], way: str = "plain") -> Linear:
    """Make the product for linear layers, in one of the ways of `onednn`."""
    if way == "plain" or sum(part.weight.numel() for part in plain_linears(parts)) < LARGE:
        return Linear(parts)
    from nde_talf.decoding.forward.onednn import OneDNNLinear, PackedLinear

    return PackedLinear(parts) if way == "packed" else OneDNNLinear(parts)
