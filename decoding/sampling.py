"""Sampling settings and the two random decisions that decoding makes.

`warp` turns logits into the distribution a setting samples from; draft and target go through the same function.
`Coins` is the only source of randomness of the policies and verifiers: a biased coin and a categorical draw, each also for
many at once on a device. A test
that replaces it by an enumeration of all outcomes obtains the exact law of the code the decode loop runs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from decoding.device import asynchronous, upload
from decoding.setting import RAW, SamplingSetting

__all__ = ["RAW", "Coins", "SamplingSetting", "nucleus", "warp"]

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
    somewhere, which `Coins` refuses.
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


class Coins:
    """Random decisions from one seeded generator."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self._uniforms: list[float] = []

    @classmethod
    def seeded(cls, seed: int) -> "Coins":
        return cls(torch.Generator().manual_seed(seed))

    def uniform(self) -> float:
        """One number in [0, 1), float64. Drawn in blocks: a single draw costs more than the coin it decides."""
        if not self._uniforms:
            self._uniforms = torch.rand(256, generator=self.generator, dtype=torch.float64).tolist()
        return self._uniforms.pop()

    def accept(self, probability: float) -> bool:
        """True with `probability`; never at 0, always at 1 or above."""
        return self.uniform() < probability

    def draw(self, weights: Tensor) -> int:
        """An index of `weights` [V] (float32 or float64, >= 0, not all 0, need not sum to 1) in proportion to its weight, by
        inverse cdf. An index of weight 0 is never returned."""
        if weights.device.type == "cpu":
            return _inside(search(host_cdf(weights), self.uniform()), weights)
        return self.draws([weights])[0]

    def draws(self, rows: Sequence[Tensor]) -> list[int]:
        """`draw` from each of `rows` in turn, with one transfer from the device for all. The same tensor may come up again."""
        distinct = {id(row): row for row in rows}
        if rows[0].device.type == "cpu":
            cdfs = {key: host_cdf(row) for key, row in distinct.items()}
            found = [search(cdfs[id(row)], self.uniform()) for row in rows]
        else:
            number = {key: index for index, key in enumerate(distinct)}
            found = search_on_device(list(distinct.values()), [number[id(row)] for row in rows], [self.uniform() for _ in rows])
        return [_inside(index, row) for index, row in zip(found, rows, strict=True)]

    def accepts(self, probabilities: Tensor) -> Tensor:
        """`accept` for each of `probabilities` [n], on their device and without waiting for it."""
        return self._uniforms_on(probabilities) < probabilities

    def tokens(self, rows: Tensor) -> Tensor:
        """`draw` from each of `rows` [n, V], on their device and without waiting for it; [n]. Equal uniforms give equal tokens.
        What it gives for a row without a positive, finite sum means nothing."""
        cdf = rows.cumsum(-1, dtype=torch.float64)
        total = cdf[:, -1:]
        below = torch.nextafter(total, torch.zeros_like(total))  # rounding must not take a search beyond the last weight
        found = torch.searchsorted(cdf, torch.minimum(self._uniforms_on(rows)[:, None] * total, below), right=True)
        return found[:, 0].clamp(max=rows.shape[-1] - 1)

    def _uniforms_on(self, like: Tensor) -> Tensor:
        return upload(torch.tensor([self.uniform() for _ in range(len(like))], dtype=torch.float64), like.device)


def host_cdf(weights: Tensor) -> np.ndarray:
    """Cumulative sums [V], float64. Raises ValueError without a positive, finite total."""
    cdf = weights.cumsum(0, dtype=torch.float64).numpy()
    _require_mass(cdf[-1])
    return cdf


def search(cdf: np.ndarray, uniform: float) -> int:
    """The first index at which `cdf` exceeds the share `uniform` of its total. numpy's search: a call takes a fraction of
    torch's."""
    return int(cdf.searchsorted(uniform * cdf[-1], "right"))


def _inside(index: int, weights: Tensor) -> int:
    """`index`, or where rounding took it beyond the end the last one that has weight."""
    return index if index < len(weights) else int(weights.nonzero()[-1])


def search_on_device(rows: list[Tensor], which: list[int], uniforms: list[float]) -> list[int]:
    """`search` of rows[which[i]] for uniforms[i], all in one go: on a device a call or a transfer is what costs."""
    cdf = torch.stack(rows).cumsum(-1, dtype=torch.float64)
    own: list[list[float]] = [[] for _ in rows]
    places = []
    for at, uniform in zip(which, uniforms, strict=True):
        places.append((len(own[at]), at))
        own[at].append(uniform)
    most = max(map(len, own))
    levels = upload(torch.tensor([line + [0.0] * (most - len(line)) for line in own], dtype=torch.float64), cdf.device)
    found = torch.searchsorted(cdf, levels * cdf[:, -1:], right=True)
    *indices, totals = torch.cat([found.to(cdf), cdf[:, -1:]], -1).T.tolist()
    for total in totals:
        _require_mass(total)
    return [int(indices[place][at]) for place, at in places]


def _require_mass(total: float) -> None:
    if not 0 < total < float("inf"):
        raise ValueError(f"weights: their sum is {total}; a distribution needs a positive, finite one")
