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
    """`search` in one go, since calls and transfers cost on a device; each row is summed once."""
    of_row: list[list[float]] = [[] for _ in range(len(rows))]
    places = []
    for row, uniform in zip(at, uniforms, strict=True):
        places.append((row, len(of_row[row])))
        of_row[row].append(uniform)
    most = max(map(len, of_row))
    padded = torch.tensor([row + [0.0] * (most - len(row)) for row in of_row], dtype=torch.float64)
    found = inverse_cdf(rows, upload(padded, rows.device)).double()
    numbers = torch.cat([found, rows.sum(-1, keepdim=True, dtype=torch.float64)], 1).tolist()
    for *_, total in numbers:
        if not 0 < total < float("inf"):
            raise massless(total)
    return [int(numbers[row][draw]) for row, draw in places]


def massless(total: float) -> ArgumentError:
    """Return the error of a distribution without mass."""
    return ArgumentError(
        f"weights: their sum is {total}; a distribution needs a positive, finite one. Either logits"
        " are not finite (try dtype=float32), or no token is allowed here (look at forbidden"
        " tokens and grammars)."
    )
