"""The network's arithmetic at one root, compiled: features and affine layers of a folded selector (`selector.fast`).

Every array is float32. Affine maps are [out, in + 1] with the bias as last column.
"""

import math
from collections.abc import Callable

import numpy as np
from numba import njit

from decoding.features import FLOOR

_SUMS = {"reassoc", "contract"}  # sums may be taken in any order, so that they are vectorised
_F = np.float32
_CHUNK = 512  # tokens of the vocabulary whose logs are held at a time
_ROOT_HALF = np.int32(np.array(0.5**0.5, np.float32).view(np.int32))
_MANTISSA = np.int32(23)  # bits


def _compiled(function: Callable) -> Callable:
    try:
        return njit(fastmath=_SUMS, cache=True)(function)
    except RuntimeError:  # no folder to keep it in may be written: compiled anew in every process, some seconds
        return njit(fastmath=_SUMS)(function)


@_compiled
def choose(states, rows, local, prices, epsilon, projections, layers, inputs, logits):
    """The largest of `logits` [C], which are written: third(gelu(second(gelu(first(inputs))))) - prices.

    states: 3 x [H]; rows: 3 x [V], p_prev, q_prev, q_root; local: what else is known, numbers; prices [C]; projections: of the
    states, centred, to the width over its square root; layers: first, second, third; inputs: for first's inputs, which
    are the normed projections, the nine sums of x log y, the sum of the larger of p_prev and q_prev, local.
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
def _affine(weights, x, out):
    last = weights.shape[1] - 1
    for i in range(len(weights)):
        total = _F(0)
        for j in range(last):
            total += weights[i, j] * x[j]
        out[i] = total + weights[i, last]


@_compiled
def _gelu(x):
    for i in range(len(x)):
        x[i] *= _F(0.5) * (_F(1) + _F(math.erf(x[i] * _F(0.5**0.5))))


@_compiled
def _sums(rows, out):
    """out [10]: the sums of x log y over all pairs (x, y) of rows, and of the larger entries of the first two."""
    out[:] = 0
    logs = np.empty((3, _CHUNK), np.float32)
    for start in range(0, len(rows[0]), _CHUNK):
        a, b, c = rows[0][start : start + _CHUNK], rows[1][start : start + _CHUNK], rows[2][start : start + _CHUNK]
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
def _log(x, out):
    """Natural logs of max(x, FLOOR), vectorised, which calls of math.log are not: x = 2^e m with m within sqrt(1/2) and
    sqrt(2), log m = 2 artanh(s) with s = (m - 1) / (m + 1), of whose series the fifth term is below float32's rounding."""
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
