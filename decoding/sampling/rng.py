"""Sampling settings and the two random decisions that decoding makes.

`warp` turns logits into the distribution a setting samples from; draft and target go through the
same function. `Rng` is the only source of randomness of the policies and verifiers: Bernoulli and
categorical draws, one or many at once. `nde_talf.decoding.testing` replaces it by an enumeration of
all outcomes and obtains the exact law of the code the decode loop runs.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.sampling.device_rng import inverse_cdf, massless, search_on_device
from nde_talf.decoding.sampling.nucleus import nucleus
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting

# A float32 softmax over more tokens than this is off by up to 5e-5 in its sum (150,000 tokens on a
# CPU): a bias of that size.
_LARGE = 1 << 14
# Probability below which nothing counts as left of a row when tokens are drawn without replacement.
# 1 / LEAST_MASS has to be a float32 number.
LEAST_MASS = 1e-30
_COLD = 1e-6  # temperatures below it could take logits beyond the largest float32 number


def warp(logits: Tensor, setting: SamplingSetting) -> Tensor:
    """Return the next-token distribution [..., V] of `logits` [..., V] under `setting`.

    It is float32 or float64, and rows sum to 1. Temperature first, then top-k, top-p and min-p
    (`nucleus`), in transformers' order. Temperature 0 gives the one-hot distribution of the first
    maximum. Logits that are NaN give a row that is NaN somewhere, which `Rng` refuses.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if setting.temperature == 0:
        top = logits.argmax(-1, keepdim=True)
        one = logits.gather(-1, top) * 0 + 1  # or NaN, which no draw takes
        return torch.zeros_like(logits).scatter_(-1, top, one)
    if setting.temperature < _COLD:
        logits = (logits - logits.amax(-1, keepdim=True)) / max(setting.temperature, 1e-30)
    elif setting.temperature != 1:
        logits = logits / setting.temperature
    probs = torch.softmax(logits, -1)
    if probs.shape[-1] >= _LARGE:
        total = probs.sum(-1, keepdim=True)  # torch's sum adds pairwise
        # In place, since a copy of a large row costs more than the division.
        probs.div_(total)
    if not setting.cuts:
        return probs
    return nucleus(probs, setting.top_p, setting.top_k, setting.min_p)


class Rng:
    """Random decisions from one seeded generator."""

    @checked
    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self._uniforms: list[float] = []  # of the block drawn last, the last one is used next

    @classmethod
    @checked
    def seeded(cls, seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]) -> "Rng":
        """Make a generator on the CPU from a seed."""
        return cls(torch.Generator().manual_seed(seed))

    def uniform(self) -> float:
        """One number in [0, 1), float64.

        Drawn in blocks: a single draw costs more than the decision that it is for.
        """
        if not self._uniforms:
            device, kind = self.generator.device, torch.float64
            block = torch.rand(256, generator=self.generator, dtype=kind, device=device)
            self._uniforms = block.tolist()
        return self._uniforms.pop()

    def bernoulli(self, probability: float) -> bool:
        """True with `probability`: never at 0, always at 1 or above."""
        return self.uniform() < probability

    def categorical(self, weights: Tensor, at: Sequence[int] | None = None) -> Any:
        """Draw indices in proportion to `weights`, by inverse cdf.

        Weights are float32 or float64, >= 0 and not all 0; they need not sum to 1. An index of
        weight 0 is never returned.

        Args:
            weights: [V], which gives one index, an int; or [n, V].
            at: the rows of weights [n, V] to draw from, one draw for each; a row may come up again.
                Gives a list of ints, with one transfer from the device for all.

        Raises:
            ValueError: a row has no positive, finite sum.
        """
        if at is None:
            return self.categorical(weights[None], [0])[0]
        return locate(weights, at, self.ahead(len(at)))

    def ahead(self, count: int) -> list[float]:
        """Uniform numbers of so many draws, for a device that makes them before they are needed."""
        return [self.uniform() for _ in range(count)]

    def rows(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Draw an index [n] from each row of `weights` [n, V], with `uniforms` [n] drawn ahead.

        Nothing is read back, so that a CUDA graph can hold it.
        """
        return inverse_cdf(weights, uniforms[:, None])[:, 0]

    def pick(self, token: int, weights: Tensor) -> int:
        """Return `token`, drawn ahead from `weights` [V]."""
        return token


def locate(weights: Tensor, at: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """Locate uniforms[i] in the cumulative sums of row at[i] of `weights` [m, V], on its device.

    Raises:
        ValueError: a row has no positive, finite total.
    """
    if weights.is_cpu:
        return search(weights, at, uniforms)
    return search_on_device(weights, at, uniforms)


def search(rows: Tensor, at: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """Locate uniforms[i] in the cumulative sums of row at[i] of `rows` [m, V], on the host.

    torch adds up and numpy searches, each of which takes a fraction of the other's time.

    Raises:
        ValueError: a row has no positive, finite total.
    """
    sums, indices = rows.cumsum(-1, dtype=torch.float64).numpy(), list[int]()
    for row, uniform in zip(at, uniforms, strict=True):
        total = sums.item(row, -1)
        if not 0 < total < math.inf:
            raise massless(total)
        below = math.nextafter(total, 0.0)  # the product may be rounded up to the total
        indices.append(int(sums[row].searchsorted(min(uniform * total, below), "right")))
    return indices
