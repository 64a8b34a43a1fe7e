"""Speculative decoding inside vLLM: its methods, and whether the installed one samples rightly."""

from pathlib import Path
from typing import Any

import torch

from nde_talf.data.engines.vllm import import_vllm
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json

Method = dict[str, Any]
"""vLLM's `speculative_config`."""


def head_method(folder: str | Path, drafted: int) -> Method:
    """An exported EAGLE or EAGLE-3 head that drafts `drafted` tokens at a time.

    Raises UserError where there is none.
    """
    config = read_json(Path(folder) / "config.json")
    if "draft_head" not in config:
        raise UserError(f"{folder}: it holds no head that stage draft exported.")
    return {
        "method": config["draft_head"]["kind"],
        "model": str(folder),
        "num_speculative_tokens": drafted,
    }


def draft_method(folder: str, drafted: int) -> Method:
    """A smaller model of the same vocabulary."""
    return {"method": "draft_model", "model": folder, "num_speculative_tokens": drafted}


def sampling_fault() -> str | None:
    """Say why sampled speculation would not follow the target in this vLLM; None if it does.

    Each drafted token's row of logits is divided by the temperature of its request. A Triton kernel
    copies temperatures (and top-p and top-k) to the rows. vLLM's CPU build has no Triton. In 0.32
    the function that replaces the kernel there writes to a temporary copy, so that the rows get
    uninitialised memory. This calls that function and looks at the result.
    """
    vllm = import_vllm()
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return None
    version = f"vLLM {vllm.__version__} on the CPU"
    try:
        from vllm.utils.cpu_triton_utils import _expand_kernel_impl

        current_platform.import_kernels()
        got = torch.full((3,), torch.nan)
        _expand_kernel_impl(
            got, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 0
        )
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        return (
            f"{version} cannot be checked to hand every drafted token its temperature"
            f" ({type(error).__name__}: {error})"
        )
    if got.tolist() == [0.5, 2.0, 2.0]:
        return None
    return (
        f"{version} hands drafted tokens other temperatures than asked for (0.5, 2, 2 came out as"
        f" {got.tolist()})"
    )
