"""Transfers between host and device, and waits of the host, in one place.

A synchronisation is a wait of the host for all that the device was asked to do. Reading a tensor is
one; so is a plain copy to a device, which is why everything goes up through `upload`.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor


def asynchronous(device: torch.device) -> bool:
    """Return True if the device works beside the host.

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
    """Copy `host` to `device`, without waiting for it."""
    if asynchronous(device):
        return host.pin_memory().to(device, non_blocking=True)
    return host if host.device == device else host.to(device)


def blocked(dtype: torch.dtype) -> float:
    """Return what is added to the score of a slot that a row does not see.

    It is no infinity, nor does it become one when a kernel multiplies it by log2 e.
    """
    return torch.finfo(dtype).min if dtype == torch.float16 else -1e30


def free_memory() -> None:
    """Release unused memory.

    A model's parts refer to one another, and CUDA's allocator keeps blocks.
    """
    gc.collect()
    torch.cuda.empty_cache()
