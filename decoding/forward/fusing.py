"""Fusing: matrices over one input become one, of which the model's become views."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn


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
