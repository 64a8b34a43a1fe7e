"""The machine: whether a device can be used, and how many CPU threads torch uses.

Imports torch when it is called.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nde_talf.data.text.settings import is_hub_name
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import DEVICE

HUB_SECONDS = 10.0


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
            f" Install a CUDA build of torch (see README, Your own models), or use {key}=cpu."
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"{key}={device}: torch, built for CUDA {torch.version.cuda}, cannot use a GPU"
            f" ({str(error).splitlines()[0]}). Or use {key}=cpu."
        ) from error
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"{key}={device}: there are {torch.cuda.device_count()} GPUs here, numbered from 0."
        )


def reach_hub(names: Iterable[str]) -> None:
    """Ask once whether the Hugging Face hub answers, where one of `names` may be on it.

    If not, its cache alone is looked at from here on: its client would try five times for every
    file.
    """
    if not any(is_hub_name(name.partition(":")[0]) and not Path(name).exists() for name in names):
        return
    import datasets
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP library that the client is made with
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that this one starts
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        console.print(
            f"! {constants.ENDPOINT} cannot be reached ({error}): only what is in its cache is"
            " found."
        )
