"""The product of a pass's rows with a weight matrix, by the faster of two libraries.

torch multiplies float32 matrices with MKL. On an AMD processor MKL takes more than twice as long
for two to eight rows with a large matrix as for one, though it reads the same weights, and so a
tree's pass costs twice a token's. oneDNN, which torch has too, reads them once. `python -m
benchmarks.forward products` measures both.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE = 1 << 19
"""Numbers in a weight matrix from which on it may go to oneDNN.

Smaller ones lie in the caches, where MKL is as fast.
"""
ROWS = range(2, 65)
"""How many rows go to oneDNN: those of trees.

It keeps memory for every number of rows, so that prompts would fill it.
"""


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """States weight^T + bias, [..., rows of weight], with states [..., H] and weight [rows, H]."""
    # In words that torch.compile reads: it knows no `in` for a size that varies.
    large = (
        ONEDNN
        and weight.numel() >= LARGE
        and ROWS.start <= states.numel() // weight.shape[1] < ROWS.stop
    )
    if (
        large
        and states.device.type == "cpu"
        and states.dtype is torch.float32
        and _as_onednn_takes_it(bias)
    ):
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return F.linear(states, weight, bias)


def _as_onednn_takes_it(bias: Tensor | None) -> bool:
    """Return True if oneDNN can take the product.

    Nothing is recorded for gradients or cast by autocast, and the bias lies in memory without gaps.
    """
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")) and (
        bias is None or bias.is_contiguous()
    )


def has_onednn() -> bool:
    """Return True if torch has oneDNN's linear layer."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _pays() -> bool:
    """Return True if oneDNN was measured to be faster on machines like this one.

    These run Linux on an AMD processor, with MKL in torch.
    """
    try:
        about = Path("/proc/cpuinfo").read_text(errors="replace")[:4096]
    except OSError:  # not Linux, or a sandbox that hides it
        return False
    return "AuthenticAMD" in about and torch.backends.mkl.is_available() and has_onednn()


ONEDNN = _pays()
