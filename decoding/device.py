"""Between host and device: what makes the host wait, in one place.

A synchronisation is a wait of the host for all that the device was asked to do. Reading a tensor is
one; so is a plain copy to a device, which is why everything goes up through `upload`.
"""

import gc
import os
from collections.abc import Callable

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError

NATIVE = "NDE_NATIVE_BF16"
"""Environment variable: 1 takes native bfloat16 as there, 0 as not there; empty or unset asks the
machine.
"""


def asynchronous(device: torch.device) -> bool:
    """Return True if the device works while the host goes on.

    The host should not ask such a device for numbers.
    """
    return device.type == "cuda"


def synchronised(clock: Callable[[], float], device: torch.device) -> Callable[[], float]:
    """Return a clock that waits until the device has done what was asked."""
    if not asynchronous(device):
        return clock

    def tick() -> float:
        torch.cuda.synchronize(device)
        return clock()

    return tick


def upload(host: Tensor, device: torch.device) -> Tensor:
    """`host` on `device`, without waiting for it."""
    if asynchronous(device):
        return host.pin_memory().to(device, non_blocking=True)
    return host if host.device == device else host.to(device)


def free_memory() -> None:
    """Release unused memory.

    A model's parts refer to one another, and CUDA's allocator keeps blocks.
    """
    gc.collect()
    torch.cuda.empty_cache()


def native_bfloat16(device: torch.device) -> bool:
    """Return whether `device` multiplies bfloat16 matrices itself, without emulation.

    Raises UserError where the environment variable is neither 0 nor 1.
    """
    if given := os.environ.get(NATIVE, ""):
        if given not in ("0", "1"):
            raise UserError(
                f"{NATIVE}={given}: it is 1 (bfloat16 is native) or 0 (it is not); unset, the"
                " machine is asked."
            )
        return given == "1"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def type_of_draft(asked: str, dtype: str, device: str) -> str:
    """Return the type of a draft on `device` beside a target of type `dtype`.

    asked: a type, or "auto": `dtype`, but bfloat16 beside float32 where the machine multiplies it
    itself. A drafted token takes a fifth less time there, and the law of the text is the same.
    """
    if asked != "auto":
        return asked
    half = dtype == "float32" and native_bfloat16(torch.device(device))
    return "bfloat16" if half else dtype
