"""Native bfloat16: whether a machine multiplies it itself, and the type of drafts that follows."""

import os

import torch

from nde_talf.decoding.common.errors import UserError

NATIVE = "NDE_NATIVE_BF16"
"""Environment variable: 1 takes native bfloat16 as there, 0 as not there; empty or unset asks the
machine.
"""


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
    itself. The shipped pair drafts in a fifth less time there, and the law of the text is the same.
    """
    if asked != "auto":
        return asked
    halved = dtype == "float32" and native_bfloat16(torch.device(device))
    return "bfloat16" if halved else dtype
