"""Safetensors files against declared names, shapes and kinds of numbers.

The header of a file says what is in it. It is compared with what has to be in it before a tensor is
made, so that a wrong file takes neither time nor memory. safetensors itself refuses a header that
claims more than the file holds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading

FLOAT, INTEGER, BOOL = "floating-point", "integer", "bool"


@dataclass(frozen=True)
class Like:
    """Expected kind and shape of a tensor; in the shape, None stands for any size."""

    shape: tuple[int | None, ...]
    kind: str = FLOAT


def read_tensors(
    path: Path, again: str, declared: Mapping[str, Like] | None = None
) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, on the CPU.

    Args:
        path: the file.
        again: what a person can do about a damaged file.
        declared: by name, all that it has to hold; None: whatever it holds.

    Raises:
        UserError: it cannot be read, holds something else, or a number that is not finite. The
            message names the file and the tensor.
    """
    with reading(path, again):
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            stored = {
                name: Like(tuple(part.get_shape()), _kind(part.get_dtype()))
                for name, part in parts.items()
            }
            fault = None if declared is None else mismatch(stored, declared)
            if fault is None:
                tensors = {name: file.get_tensor(name) for name in stored}
                fault = not_finite(tensors)
        if fault is None:
            return tensors
        raise UserError(
            f"{path}: {fault}. It is of something else, or damaged: take the right file, or"
            f" {again}."
        )


def mismatch(found: Mapping[str, Like], declared: Mapping[str, Like]) -> str | None:
    """Describe in words how tensors differ from what is declared; None if they do not."""
    for name, expected in declared.items():
        actual = found.get(name)
        if actual is None:
            return f"the tensor {name} is missing"
        same = len(actual.shape) == len(expected.shape)
        if not same or any(
            size not in (None, has) for has, size in zip(actual.shape, expected.shape, strict=True)
        ):
            shape = ", ".join("any" if size is None else str(size) for size in expected.shape)
            return f"its tensor {name} is of shape {list(actual.shape)}, and has to be [{shape}]"
        if actual.kind != expected.kind:
            return (
                f"its tensor {name} holds {actual.kind} numbers, and has to hold"
                f" {expected.kind} ones"
            )
    unknown = sorted(found.keys() - declared.keys())
    return f"nobody knows its tensor {unknown[0]}" if unknown else None


def not_finite(tensors: Mapping[str, Tensor], largest: float = math.inf) -> str | None:
    """Describe in words which tensor holds NaN, or numbers of that size; None if none does."""
    for name, tensor in tensors.items():
        wide = (
            tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel()
        )  # numbers of 8 bits have no infinity
        if wide and not float(torch.stack(torch.aminmax(tensor)).abs().max()) < largest:
            return f"its tensor {name} holds NaN, infinite or huge numbers"
    return None


def _kind(dtype: str) -> str:
    """Return the kind of a dtype by its name in a file (F32, I64)."""
    name = dtype.lower()
    return BOOL if name == "bool" else FLOAT if name.startswith(("f", "bf")) else INTEGER
