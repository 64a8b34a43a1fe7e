"""Sampling settings and the two random decisions that decoding makes.

`warp` turns logits into the distribution a setting samples from; draft and target go through the same function.
`Rng` is the only source of randomness of the policies and verifiers: Bernoulli and categorical draws, one or many at once.
`decoding.testing` replaces it by an enumeration of all outcomes and obtains the exact law of the code the decode loop runs.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from decoding.common.renamed import notice
from decoding.device import asynchronous, upload
from decoding.setting import RAW, SamplingSetting

__all__ = ["RAW", "Rng", "SamplingSetting", "inverse_cdf", "nucleus", "warp"]

# A float32 softmax over more tokens than this is off by up to 5e-5 in its sum (150,000 tokens on a CPU): a bias of that size.
_LARGE = 1 << 14
# Probability below which nothing counts as left of a row when tokens are drawn without replacement. 1 / LEAST_MASS has to be a
# float32 number.
LEAST_MASS = 1e-30
_COLD = 1e-6  # temperatures below it could take logits beyond the largest float32 number
_NUCLEUS_GUESS = 64  # tokens looked at before a full sort is paid for, where a look costs less


def warp(logits: Tensor, setting: SamplingSetting) -> Tensor:
    """Next-token distribution [..., V] (float32 or float64, rows sum to 1) of `logits` [..., V] under `setting`.

    Temperature first, then the nucleus (the smallest set of most likely tokens whose mass reaches top-p), as in
    transformers. Temperature 0 gives the one-hot distribution of the first maximum. Logits that are NaN give a row that is NaN
    somewhere, which `Rng` refuses.
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
        probs = probs / probs.sum(-1, keepdim=True, dtype=torch.float64).to(probs.dtype)
    return nucleus(probs, setting.top_p) if setting.top_p < 1 else probs


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """`probs` [..., V] restricted to its top-p nucleus and renormalised: the smallest set of tokens, in order of probability
    and of equal ones the lower id first, whose mass reaches top_p. Sums are in float64."""
    guess = probs.shape[-1] > _NUCLEUS_GUESS and not asynchronous(probs.device)
    if guess:
        top, ids = probs.topk(_NUCLEUS_GUESS, -1)
        kept = _reached(top, top_p)
        # topk has equal numbers in any order, which matters where the nucleus ends between two of them.
        tied = (kept[..., :-1] > kept[..., 1:]) & (top[..., :-1] == top[..., 1:])
        guess = not bool((kept[..., -1] | tied.any(-1)).any())
    if not guess:
        top, ids = probs.sort(dim=-1, descending=True, stable=True)
        kept = _reached(top, top_p)
    top = top * kept
    top = top / top.sum(-1, keepdim=True, dtype=torch.float64).to(top.dtype)
    return torch.zeros_like(probs).scatter_(-1, ids, top)


def _reached(ranked: Tensor, top_p: float) -> Tensor:
    """[..., n]: whether the numbers before each one sum to less than top_p."""
    return F.pad((ranked.cumsum(-1, dtype=torch.float64) < top_p)[..., :-1], (1, 0), value=True)


_OLD_NAMES = {"accept": "bernoulli", "accepts": "bernoulli", "draw": "categorical", "draws": "categorical"}
_OLD_NAMES["tokens"] = "categorical"


class Rng:
    """Random decisions from one seeded generator."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self._uniforms: list[float] = []  # of the block drawn last, those not used yet; the last one is used next
        self._block: Tensor | None = None  # the same block in order of use, on the device that asked

    @classmethod
    def seeded(cls, seed: int) -> "Rng":
        return cls(torch.Generator().manual_seed(seed))

    def uniform(self) -> float:
        """One number in [0, 1), float64. Drawn in blocks: a single draw costs more than the decision that it is for."""
        if not self._uniforms:
            self._uniforms = torch.rand(256, generator=self.generator, dtype=torch.float64).tolist()
            self._block = None
        return self._uniforms.pop()

    @overload
    def bernoulli(self, probability: float) -> bool: ...
    @overload
    def bernoulli(self, probability: Tensor) -> Tensor: ...

    def bernoulli(self, probability: float | Tensor) -> bool | Tensor:
        """True with `probability`: never at 0, always at 1 or above. For a tensor [n] a tensor of bool [n] on its device,
        without waiting for it."""
        if isinstance(probability, Tensor):
            return self._uniforms_on(probability) < probability
        return self.uniform() < probability

    @overload
    def categorical(self, weights: Tensor | Sequence[Tensor], at: Sequence[int]) -> list[int]: ...
    @overload
    def categorical(self, weights: Sequence[Tensor], at: None = None) -> list[int]: ...
    @overload
    def categorical(self, weights: Tensor, at: None = None) -> Any: ...

    def categorical(self, weights: Tensor | Sequence[Tensor], at: Sequence[int] | None = None) -> int | list[int] | Tensor:
        """Indices drawn in proportion to `weights` (float32 or float64, >= 0, not all 0, need not sum to 1), by inverse cdf.
        An index of weight 0 is never returned.

        Args:
            weights: [V] gives one index, an int. A list of rows [V] gives a list of ints, with one transfer from the device
                for all; the same tensor may come up again. [n, V] gives a tensor [n] on their device, without waiting for it:
                equal uniforms give equal indices, and what it gives for a row without a positive, finite sum means nothing.
            at: of weights [n, V] the rows to draw from, one draw for each; a row may come up again. Gives a list of ints.

        Raises:
            ValueError: a row [V] has no positive, finite sum.
        """
        if not isinstance(weights, Tensor):
            distinct = {id(row): row for row in weights}
            number = {key: index for index, key in enumerate(distinct)}
            weights, at = torch.stack(list(distinct.values())), [number[id(row)] for row in weights]
        elif weights.dim() == 1:
            return self.categorical(weights[None], [0])[0]
        if at is None:
            return inverse_cdf(weights, self._uniforms_on(weights)[:, None])[:, 0]
        uniforms = [self.uniform() for _ in at]
        found = (search if weights.device.type == "cpu" else search_on_device)(weights, at, uniforms)
        last = weights.shape[-1]  # beyond it, where rounding took a search, the last token that has weight
        return [index if index < last else int(weights[row].nonzero()[-1]) for index, row in zip(found, at, strict=True)]

    def __getattr__(self, name: str) -> Any:
        if name not in _OLD_NAMES:
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        notice(f"Rng.{name}", _OLD_NAMES[name])
        return getattr(self, _OLD_NAMES[name])

    def _uniforms_on(self, like: Tensor) -> Tensor:
        count, device = len(like), like.device
        left = len(self._uniforms) - count
        if left < 0:  # from two blocks
            return upload(torch.tensor([self.uniform() for _ in range(count)], dtype=torch.float64), device)
        if self._block is None or self._block.device != device:
            self._block = upload(torch.tensor(self._uniforms, dtype=torch.float64).flip(0), device)
        del self._uniforms[left:]
        end = len(self._block) - left
        return self._block[end - count : end]


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Where `uniforms` [n, c] in [0, 1) fall in the cumulative sums of `weights` [n, V], in float64, without a look at the
    numbers: indices [n, c], never one of weight 0. Of a row without a positive, finite sum they mean nothing."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # rounding must not take a search beyond the last weight
    found = torch.searchsorted(cdf, torch.minimum(uniforms * total, below), right=True)
    return found.clamp_(max=weights.shape[-1] - 1)


def search(rows: Tensor, at: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """The same on the host, for uniforms[i] in row at[i] of `rows` [m, V]. Where rounding takes it beyond the end it gives V.
    numpy's search: a call takes a fraction of torch's. Raises ValueError for a row without a positive, finite total."""
    cdfs = rows.cumsum(-1, dtype=torch.float64).numpy()
    totals = _with_mass(cdfs[:, -1].tolist())
    return [int(cdfs[row].searchsorted(uniform * totals[row], "right")) for row, uniform in zip(at, uniforms, strict=True)]


def search_on_device(rows: Tensor, at: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """`search` in one go: on a device a call or a transfer is what costs."""
    index = upload(torch.tensor([at, uniforms], dtype=torch.float64), rows.device)
    found = inverse_cdf(rows.index_select(0, index[0].long()), index[1][:, None])[:, 0]
    numbers = torch.cat([found.double(), rows.sum(-1, dtype=torch.float64)]).tolist()
    _with_mass(numbers[len(at) :])
    return [int(number) for number in numbers[: len(at)]]


def _with_mass(totals: list[float]) -> list[float]:
    for total in totals:
        if not 0 < total < float("inf"):
            raise ValueError(f"weights: their sum is {total}; a distribution needs a positive, finite one")
    return totals


def __getattr__(name: str) -> Any:
    if name != "Coins":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    notice("decoding.sampling.Coins", "Rng")
    return Rng
