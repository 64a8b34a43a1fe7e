"""Choose how a model's large matrices are multiplied.

For example, on an AMD EPYC 40 matrices of 4,864 x 896 in float32 take 41 ms for one row in torch's
own way and 18 packed, 54 and 22 for eight.
"""

import psutil
from torch import nn

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.forward.fused_weights import LEAST
from nde_talf.decoding.models.forward.onednn import has_onednn
from nde_talf.decoding.names import PRODUCTS


def choose_product(module: nn.Module, asked: str = "auto", packs: bool = False) -> str:
    """Return the way to multiply the large matrices of `module`, or the one asked for.

    "auto" is packed where there is memory for a copy of the weights, otherwise oneDNN on the
    weights as they are, and torch's own way where oneDNN has none for them.

    Args:
        module: a transformers model.
        asked: "auto", or a way of `onednn`.
        packs: whether packing is a choice: it takes memory for a copy of the weights.

    Raises:
        UserError: the way asked for is none, or oneDNN has none for these weights.
    """
    weights = list(module.parameters())
    dtype = weights[0].dtype
    if asked not in PRODUCTS:
        raise UserError(f"products={asked}; choose one of {', '.join(PRODUCTS)}.")
    if asked not in ("auto", "plain") and not has_onednn(dtype):
        raise UserError(
            f"products={asked}: oneDNN has no {dtype} products with this torch on this processor."
            " Choose auto or plain."
        )
    if asked != "auto":
        return asked
    large = max(weight.numel() for weight in weights) >= LEAST
    if not (large and has_onednn(dtype) and all(weight.is_cpu for weight in weights)):
        return "plain"
    # Room for twice the weights beside what is in use.
    needed = 2 * sum(weight.nbytes for weight in weights)
    return "packed" if packs and psutil.virtual_memory().available > needed else "onednn"
