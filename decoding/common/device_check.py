"""Check that a device can be used. Imports torch when it is called."""

import re

from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.common.settings import DEVICE


def check_device(device: str, key: str = "model.device") -> None:
    """Check that torch can use a device.

    Raises:
        UserError: it cannot, or there is no such device, with the reason and the remedy.
    """
    if not re.fullmatch(DEVICE, device):
        raise UserError(f"{key}={device}: it must be cpu, cuda or cuda:N, such as {key}=cuda:0.")
    if device == "cpu":
        return
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise UserError(
            f"{key}={device}: the installed torch {torch.__version__} is built for CPUs alone."
            f" Install a CUDA build of torch (TORCH_INDEX, see CONTRIBUTING.md), or use {key}=cpu."
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"{key}={device}: torch, built for CUDA {torch.version.cuda}, cannot use a GPU"
            f" ({first_line(error)}). Or use {key}=cpu."
        ) from error
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"{key}={device}: there are {torch.cuda.device_count()} GPUs here, numbered from 0."
        )
