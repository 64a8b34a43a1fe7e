"""The machine: whether a device can be used, and how many CPU threads torch uses. Imports torch when it is called."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decoding.common.errors import UserError
from decoding.names import DEVICE


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads inside the block; 0 changes nothing."""
    import torch

    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_device(device: str, key: str = "model.device") -> None:
    """Raise UserError, with the reason and the remedy, for a device that is none of `DEVICE`, or that torch cannot use."""
    if not DEVICE.fits(device):
        raise UserError(f"{key}={device}: it must be {DEVICE}, such as {key}={DEVICE.example}.")
    if device == "cpu":
        return
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise UserError(
            f"{key}={device}: the installed torch {torch.__version__} is built for CPUs alone. Install a CUDA build of torch "
            f"(see README, Your own models), or use {key}=cpu."
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"{key}={device}: {_reason(str(error), torch.version.cuda)} Or use {key}=cpu.") from error
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(f"{key}={device}: there are {torch.cuda.device_count()} GPUs here, numbered from 0.")


def _reason(text: str, cuda: str | None) -> str:
    """Why CUDA did not start, from torch's message."""
    if "too old" in text:
        return (
            f"the NVIDIA driver is too old for this torch, which is built for CUDA {cuda}. Update the driver, or install a "
            "torch that is built for an older CUDA."
        )
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        return f"there is an NVIDIA driver, but torch (built for CUDA {cuda}) cannot use it: {text.splitlines()[0]}"
    return "there is no NVIDIA driver, so no GPU that torch could use."
