"""Draws on a device, by inverse cdf."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import ArgumentError
from nde_talf.decoding.device import upload


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Locate `uniforms` [n, c] in [0, 1) in the cumulative sums of `weights` [n, V].

    Sums are in float64; the host does not look at the numbers.

    Returns:
        Indices [n, c], never one of weight 0. For a row without a positive, finite sum they are
        meaningless.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    below = torch.nextafter(
        total, torch.zeros_like(total)
    )  # rounding must not take a search beyond the last weight
    index = torch.searchsorted(cdf, torch.minimum(uniforms * total, below), right=True)
    return index.clamp_(max=weights.shape[-1] - 1)


def search_on_device(rows: Tensor, at: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """`search` in one go, since calls and transfers cost on a device."""
    drawn = rows[upload(torch.tensor(at), rows.device)]
    numbers = upload(torch.tensor(uniforms, dtype=torch.float64), rows.device)[:, None]
    totals = drawn.sum(-1, keepdim=True, dtype=torch.float64)
    found = torch.cat([inverse_cdf(drawn, numbers).double(), totals], 1).tolist()
    for _, total in found:
        if not 0 < total < float("inf"):
            raise massless(total)
    return [int(index) for index, _ in found]


def massless(total: float) -> ArgumentError:
    """Return the error of a distribution without mass."""
    return ArgumentError(
        f"weights: their sum is {total}; a distribution needs a positive, finite one. Either logits"
        " are not finite (try dtype=float32), or no token is allowed here (look at forbidden"
        " tokens and grammars)."
    )
