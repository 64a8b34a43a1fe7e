"""Confidence intervals of throughput ratios: whole prompts resampled, since roots of one prompt are alike."""

from collections.abc import Callable

import torch
from torch import Tensor

RESAMPLES = 1000


def resampling(prompt: Tensor, resamples: int = RESAMPLES) -> Callable[[Tensor, Tensor, Tensor, Tensor], list[float]]:
    """A function of (tokens, seconds, base tokens, base seconds) [R] that gives [ratio, low, high] of the two throughputs,
    resampling whole prompts (`prompt` [R])."""
    ids, group = prompt.unique(return_inverse=True)
    draws = torch.randint(len(ids), (resamples, len(ids)), generator=torch.Generator().manual_seed(0))

    def ratio(x: Tensor) -> Tensor:
        return (x[0] / x[1]) / (x[2] / x[3])

    def interval(*columns: Tensor) -> list[float]:
        sums = torch.zeros(4, len(ids), dtype=torch.float64)
        for row, values in zip(sums, columns, strict=True):
            row.index_add_(0, group, values.double())
        low, high = ratio(sums[:, draws].sum(-1)).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return [float(ratio(sums.sum(-1))), low, high]

    return interval
