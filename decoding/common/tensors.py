"""Safetensors files whose numbers are finite.

safetensors itself refuses a header that claims more than the file holds.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading

LARGEST = 1e9
"""Larger than every number of a trained model."""


def read_tensors(path: Path, again: str) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, on the CPU.

    Args:
        path: the file.
        again: what a person can do about a damaged file.

    Raises:
        UserError: it cannot be read, or holds a number that is not finite. The message names the
            file and the tensor.
    """
    with reading(path, again):
        tensors: dict[str, Tensor] = load_file(path)
        if broken := unsound(tensors.items()):
            raise UserError(
                f"{path}: its tensor {broken[0]} holds NaN or infinite numbers. It is of something"
                f" else, or damaged: take the right file, or {again}."
            )
        return tensors


def unsound(tensors: Iterable[tuple[str, Tensor]], largest: float = math.inf) -> list[str]:
    """List the names of the tensors that hold NaN, or numbers of that size; none is copied."""
    return [
        name
        for name, tensor in tensors
        if tensor.is_floating_point()
        and tensor.itemsize > 1  # numbers of 8 bits have no infinity
        and tensor.numel()
        and not float(torch.stack(torch.aminmax(tensor)).abs().max()) < largest
    ]
