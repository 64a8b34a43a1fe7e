"""The precision of a training: `auto` is bfloat16 where the machine multiplies it itself, else
float32.

Two machines may therefore train other weights from the same command. What was chosen is printed,
and kept with what was trained; with a precision by name (draft.precision=32-true) machines agree up
to rounding.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nde_talf.decoding.common.errors import UserError

AUTO = "auto"
NATIVE = "NDE_NATIVE_BF16"
"""Environment variable: 1 takes native bfloat16 as there, 0 as not there; empty or unset asks the
machine.
"""

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Lightning's names of the precisions under which autocast casts the weights of matrix products,
and to what.
"""


def native_bfloat16(device: torch.device | None = None) -> bool:
    """Whether `device` (None: wherever a training runs here) multiplies bfloat16 matrices itself,
    without emulation.

    Raises UserError where the environment variable is neither 0 nor 1.
    """
    if said := os.environ.get(NATIVE, ""):
        if said not in ("0", "1"):
            raise UserError(
                f"{NATIVE}={said}: it is 1 (bfloat16 is native) or 0 (it is not); unset, the"
                " machine is asked."
            )
        return said == "1"
    if device.type == "cuda" if device is not None else torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolved(asked: str = AUTO, device: torch.device | None = None) -> str:
    """Lightning's name of the precision asked for: itself, or what `auto` is on `device` (None:
    wherever a training runs).
    """
    return asked if asked != AUTO else "bf16-mixed" if native_bfloat16(device) else "32-true"


def explained(asked: str, chosen: str) -> str:
    """What is printed before a training."""
    why = "computes" if chosen.startswith("bf16") else "does not compute"
    return f"precision: {chosen}" + (
        f" (auto: this machine {why} bfloat16 natively)" if asked == AUTO else ""
    )


def check_resumed(checkpoint: dict[str, Any], now: str, name: str) -> None:
    """Raise UserError for a checkpoint of a training that began in another precision than `now`; an
    old one does not say.
    """
    began = checkpoint.get("trained_in", now)
    if began != now:
        raise UserError(
            f"The unfinished training in {name} began in precision {began}, and this machine would"
            f" go on in {now}. Go on where it began, or with the same precision"
            f" (draft.precision={began}; {NATIVE}={int(began.startswith('bf16'))} for the pair's"
            " models), or delete the checkpoint to start again."
        )


@contextmanager
def cast_once(frozen: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the block the matrices of `frozen`'s linear layers are in `dtype` (None: left as they
    are), and afterwards as before.

    Autocast casts a float32 matrix before every product, and keeps the copy only of weights that
    get gradients. Here those of a frozen model are cast once, with the same results: autocast takes
    them as they are. The float32 matrices wait in the CPU's memory. A matrix that an embedding
    shares stays in float32.
    """
    embedded = {
        id(module.weight) for module in frozen.modules() if isinstance(module, nn.Embedding)
    }
    layers = [
        module.weight
        for module in frozen.modules()
        if type(module) is nn.Linear and id(module.weight) not in embedded
    ]
    before = [
        (weight, weight.data.cpu()) for weight in layers if dtype and weight.dtype == torch.float32
    ]
    try:
        for weight, _ in before:
            weight.data = weight.data.to(dtype)
        yield
    finally:
        for weight, matrix in before:
            weight.data = matrix.to(weight.device)
