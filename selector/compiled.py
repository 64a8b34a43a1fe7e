"""One choice of a trained selector on a CPU, in as little time as it takes: what the decode loop
calls at every step there.

`CompiledSelector` folds a selector into few arrays, and `_choose` is all of its arithmetic at one
root as one compiled function: after the models' passes nothing of the selector is in cache, and
what takes time is how much code runs, not how much it computes. An engine of vLLM cannot start in a
process that has imported numba, so this module is imported where it is used.
"""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn

from nde_talf.decoding.features import FLOOR, FROM_PRODUCTS
from nde_talf.selector.latency import StepCosts
from nde_talf.selector.network import Selector

_SUMS = {"reassoc", "contract"}  # sums may be taken in any order, so that they are vectorised
_F = np.float32
_CHUNK = 512  # tokens of the vocabulary whose logs are held at a time
_ROOT_HALF = np.int32(np.array(0.5**0.5, np.float32).view(np.int32))
_MANTISSA = np.int32(23)  # bits

Part = TypeVar("Part", bound=nn.Module)


Arrays = tuple[np.ndarray, ...]


class CompiledSelector:
    """The argmax of a `Selector` at one root, in evaluation mode, priced by `costs`; `logits` [C]
    are those of the last choice, over the sharpness where there is one.

    Standardisation, the layer norms' centring and scales, the linear part of the scalar features
    and all biases are folded into the weights. Equal to the selector's own forward pass up to
    rounding.
    """

    @torch.no_grad()
    def __init__(self, selector: Selector, costs: StepCosts):
        network, schema, self._costs = selector.network.cpu().float(), selector.schema, costs
        first, second, third = _parts(network.mlp, nn.Linear)
        projections, norms = (
            _parts(network.projections, nn.Linear),
            _parts(network.projections, nn.LayerNorm),
        )
        width = schema.width
        # A layer norm takes the mean over the outputs away; its root mean square is then the norm
        # over sqrt(width).
        centred = [
            [part - part.mean(0) for part in (p.weight, p.bias[:, None])] for p in projections
        ]
        if not schema.target_hidden:
            centred.insert(0, [torch.zeros(0, 1)])  # of no state, to no outputs

        wide = len(projections) * width
        states, scalars = first.weight[:, :wide], first.weight[:, wide:] * selector.scale.cpu()
        gains = torch.cat([norm.weight for norm in norms]) * width**0.5
        shifts = torch.cat([norm.bias for norm in norms])
        # The L1 distance of two distributions is twice the sum of their larger entries, less 2.
        bias = first.bias + states @ shifts - scalars @ selector.mean.cpu() - 2 * scalars[:, 5]
        parts = [scalars[:, :5] @ FROM_PRODUCTS, 2 * scalars[:, 5:6], scalars[:, 6:]]
        layers = [torch.cat([states * gains, *parts, bias[:, None]], 1)]
        layers += [torch.cat([layer.weight, layer.bias[:, None]], 1) for layer in (second, third)]

        prices = costs.seconds.log() if schema.sharpness else torch.zeros_like(costs.seconds)
        self._prices, self._passes = list(_array(prices)), costs.passes.tolist()
        self.logits = np.empty(prices.shape[1], np.float32)
        inputs = np.empty(layers[0].shape[1] - 1, np.float32)
        folded = (
            tuple(_array(torch.cat(own, 1) / width**0.5) for own in centred),
            tuple(map(_array, layers)),
        )
        self._folded = norms[0].eps, *folded, inputs, self.logits
        row = torch.full((2,), 0.5)
        self.choose(
            (torch.zeros(schema.target_hidden), *[torch.zeros(schema.draft_hidden)] * 2),
            (row,) * 3,
            1,
            1.0,
            1.0,
        )

    def choose(
        self,
        states: Iterable[Tensor],
        rows: Iterable[Tensor],
        context: int,
        temperature: float,
        top_p: float,
    ) -> int:
        """The action's index.

        Args:
            states: h_p_previous [H_p], or [0] where it does not look at the target, h_q_previous
                [H_q], h_q_root [H_q].
            rows: p_prev, q_prev, q_root, each [V].
        """
        (h0, h1, h2), (p0, q0, q1), at = (
            map(_floats, states),
            map(_floats, rows),
            self._costs.row(context),
        )
        local = (float(context), float(temperature), float(top_p), *self._passes[at])
        return _choose((h0, h1, h2), (p0, q0, q1), local, self._prices[at], *self._folded)


def _parts(module: nn.Module, kind: type[Part]) -> list[Part]:
    return [part for part in module.modules() if isinstance(part, kind)]


def _floats(tensor: Tensor) -> np.ndarray:
    return (tensor if tensor.dtype == torch.float32 else tensor.float()).numpy()


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy().copy()


def _compiled(function: Callable) -> Callable:
    try:
        return njit(fastmath=_SUMS, cache=True)(function)
    except (
        RuntimeError
    ):  # no folder to keep it in may be written: compiled anew in every process, some seconds
        return njit(fastmath=_SUMS)(function)


@_compiled
def _choose(
    states: Arrays,
    rows: Arrays,
    local: np.ndarray,
    prices: np.ndarray,
    epsilon: float,
    projections: Arrays,
    layers: Arrays,
    inputs: np.ndarray,
    logits: np.ndarray,
) -> int:
    """The largest of `logits` [C], which are written: third(gelu(second(gelu(first(inputs))))) -
    prices.

    Every array is float32. Affine maps are [out, in + 1] with the bias as last column.

    Args:
        states: 3 x [H].
        rows: 3 x [V], p_prev, q_prev, q_root.
        local: what else is known, numbers.
        prices: [C].
        projections: of the states, centred, to the width over its square root.
        layers: first, second, third.
        inputs: written, the inputs of `first`: the normed projections, the nine sums of x log y,
            the sum of the larger of p_prev and q_prev, local.
    """
    at = 0
    for state, projection in zip(states, projections):  # noqa: B905 (numba knows no strict)
        out = inputs[at : at + len(projection)]
        _affine(projection, state, out)
        square = _F(epsilon)
        for i in range(len(out)):
            square += out[i] * out[i]
        out /= np.sqrt(square)
        at += len(out)
    _sums(rows, inputs[at : at + 10])
    for i in range(len(local)):
        inputs[at + 10 + i] = local[i]

    first, second, third = layers
    x, y = np.empty(len(first), np.float32), np.empty(len(second), np.float32)
    _affine(first, inputs, x)
    _gelu(x)
    _affine(second, x, y)
    _gelu(y)
    _affine(third, y, logits)
    best = 0
    for i in range(len(logits)):
        logits[i] -= prices[i]
        if logits[i] > logits[best]:
            best = i
    return best


@_compiled
def _affine(weights: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    last = weights.shape[1] - 1
    for i in range(len(weights)):
        total = _F(0)
        for j in range(last):
            total += weights[i, j] * x[j]
        out[i] = total + weights[i, last]


@_compiled
def _gelu(x: np.ndarray) -> None:
    for i in range(len(x)):
        x[i] *= _F(0.5) * (_F(1) + _F(math.erf(x[i] * _F(0.5**0.5))))


@_compiled
def _sums(rows: Arrays, out: np.ndarray) -> None:
    """Out [10]: the sums of x log y over all pairs (x, y) of rows, and of the larger entries of the
    first two.
    """
    out[:] = 0
    logs = np.empty((3, _CHUNK), np.float32)
    for start in range(0, len(rows[0]), _CHUNK):
        a, b, c = (
            rows[0][start : start + _CHUNK],
            rows[1][start : start + _CHUNK],
            rows[2][start : start + _CHUNK],
        )
        for i, row in enumerate((a, b, c)):
            _log(row, logs[i])
        for i, row in enumerate((a, b, c)):
            by_a, by_b, by_c = _F(0), _F(0), _F(0)
            for j in range(len(row)):
                by_a += row[j] * logs[0, j]
                by_b += row[j] * logs[1, j]
                by_c += row[j] * logs[2, j]
            out[3 * i] += by_a
            out[3 * i + 1] += by_b
            out[3 * i + 2] += by_c
        larger = _F(0)
        for j in range(len(a)):
            larger += max(a[j], b[j])
        out[9] += larger


@_compiled
def _log(x: np.ndarray, out: np.ndarray) -> None:
    """Natural logs of max(x, FLOOR), vectorised, which calls of math.log are not: x = 2^e m with m
    within sqrt(1/2) and sqrt(2), log m = 2 artanh(s) with s = (m - 1) / (m + 1), of whose series
    the fifth term is below float32's rounding.
    """
    bits = out.view(np.int32)
    for i in range(len(x)):
        out[i] = max(x[i], _F(FLOOR))
    for i in range(len(x)):
        exponent = (bits[i] - _ROOT_HALF) >> _MANTISSA
        bits[i] -= exponent << _MANTISSA
        s = (out[i] - _F(1)) / (out[i] + _F(1))
        t = s * s
        series = _F(1) + t * (_F(1 / 3) + t * (_F(1 / 5) + t * _F(1 / 7)))
        out[i] = _F(exponent) * _F(math.log(2)) + _F(2) * s * series
