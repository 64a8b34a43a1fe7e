"""Safetensors files whose numbers are finite.

safetensors itself refuses a header that claims more than the file holds.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading


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
        if fault := not_finite(tensors):
            raise UserError(
                f"{path}: {fault}. It is of something else, or damaged: take the right file, or"
                f" {again}."
            )
        return tensors


def not_finite(tensors: Mapping[str, Tensor], largest: float = math.inf) -> str | None:
    """Describe in words which tensor holds NaN, or numbers of that size; None if none does."""
    for name, tensor in tensors.items():
        wide = (
            tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel()
        )  # numbers of 8 bits have no infinity
        if wide and not float(torch.stack(torch.aminmax(tensor)).abs().max()) < largest:
            return f"its tensor {name} holds NaN, infinite or huge numbers"
    return None
