"""Precision of a training: `auto` is bfloat16 where the machine multiplies it natively.

Two machines may therefore train different weights from the same command. The choice is printed and
stored with the weights; with a named precision (draft.precision=32-true) machines agree up to
rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def default_device() -> torch.device:
    """Return the device that a language model is trained on: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def cast_once(frozen: nn.Module, precision: str) -> Iterator[None]:
    """Hold a frozen model's linear matrices in bfloat16 inside the block, under bf16-mixed.

    Autocast casts a float32 matrix before every product, and keeps the copy only of weights with
    gradients. Casting a frozen model's matrices once gives the same results. The float32 matrices
    wait in the CPU's memory. A matrix shared with an embedding stays in float32.
    """
    embedded = {id(each.weight) for each in frozen.modules() if isinstance(each, nn.Embedding)}
    linear = [each.weight for each in frozen.modules() if type(each) is nn.Linear]
    before = [
        (weight, weight.data.cpu())
        for weight in linear
        if precision == "bf16-mixed"
        and weight.dtype == torch.float32
        and id(weight) not in embedded
    ]
    try:
        for weight, _ in before:
            weight.data = weight.data.to(torch.bfloat16)
        yield
    finally:
        for weight, matrix in before:
            weight.data = matrix.to(weight.device)
