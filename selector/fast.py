"""One choice of a trained selector on a CPU, in as little time as it takes: what the decode loop calls at every step there."""

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from decoding.features import FLOOR, FROM_PRODUCTS
from selector.latency import StepCosts
from selector.selector import Selector


class FastSelector:
    """The argmax of a `Selector` at one root, in evaluation mode, priced by `costs`. In NumPy, whose small operations cost a
    third of torch's.

    Behind the models' passes nothing of it is in cache, and every operation costs some 15 µs whatever its size: so there are
    few. Standardisation, the layer norms' centring and scales, the linear part of the scalar features and all biases are
    folded into the weights, and buffers are kept. Equal to the selector's own forward pass up to rounding.
    """

    @torch.no_grad()
    def __init__(self, selector: Selector, costs: StepCosts):
        network, self.costs, width = selector.network.cpu().float(), costs, selector.schema.width
        first, second, third = network.mlp[0], network.mlp[3], network.mlp[6]
        # A layer norm takes the mean over the outputs away; its root mean square is then the norm over sqrt(width).
        centred = [[part - part.mean(0) for part in (p[0].weight, p[0].bias[:, None])] for p in network.projections]
        self._projections = [_array(torch.cat(parts, 1) / width**0.5) for parts in centred]
        self._epsilon = network.projections[0][1].eps
        ends = np.cumsum([projection.shape[1] for projection in self._projections])
        self._one, self._states = torch.ones(1), torch.empty(int(ends[-1]))
        self._each_state = np.split(self._states.numpy(), ends[:-1])

        states, scalars = first.weight[:, : 3 * width], first.weight[:, 3 * width :] * selector.scale.cpu()
        gains = torch.cat([p[1].weight for p in network.projections]) * width**0.5
        shifts = torch.cat([p[1].bias for p in network.projections])
        # The L1 distance of two distributions is twice the sum of their larger entries, less 2.
        bias = first.bias + states @ shifts - scalars @ selector.mean.cpu() - 2 * scalars[:, 5]
        scalars = [scalars[:, :5] @ FROM_PRODUCTS, 2 * scalars[:, 5:6], scalars[:, 6:]]
        self._first = _array(torch.cat([states * gains, *scalars, bias[:, None]], 1))
        # Its inputs: states; sums of products; larger entries, context, temperature, top-p, two latencies; 1.
        self._inputs = np.ones(3 * width + 16, np.float32)
        self._normed, self._products = self._inputs[:-16].reshape(3, width), self._inputs[-16:-7].reshape(3, 3)
        self._rows = self._logs = np.empty((3, 0), np.float32)
        self._passes = costs.passes.tolist()

        self._second, self._third = _array(torch.cat([second.weight, second.bias[:, None]], 1)), _array(third.weight)
        self._hidden = np.ones(self._second.shape[1], np.float32)
        prices = costs.seconds.log() if selector.schema.sharpness else torch.zeros(len(costs.seconds), 1)
        self._offset = _array(third.bias - prices)

    def choose(
        self, states: tuple[Tensor, ...], rows: tuple[Tensor, ...], context: int, temperature: float, top_p: float
    ) -> int:
        """The option's index. states: h_p_previous, h_q_previous, h_q_root [H]; rows: p_prev, q_prev, q_root [V]."""
        return int(self.values(states, rows, context, temperature, top_p).argmax())

    def values(self, states, rows, context, temperature, top_p) -> np.ndarray:
        """The logits [C], over the sharpness where there is one."""
        at, inputs, normed, one = self.costs.row(context), self._inputs, self._normed, self._one
        torch.cat((states[0], one, states[1], one, states[2], one), out=self._states)
        for projection, state, projected in zip(self._projections, self._each_state, normed, strict=True):
            np.dot(projection, state, out=projected)
        squares = np.einsum("ij,ij->i", normed, normed)
        squares += self._epsilon
        normed /= np.sqrt(squares, out=squares)[:, None]

        if self._rows.shape[1] != len(rows[0]):
            self._rows, self._logs = (np.empty((3, len(rows[0])), np.float32) for _ in range(2))
        stacked, logs = self._rows, self._logs
        torch.stack(rows, out=torch.from_numpy(stacked))
        np.log(np.maximum(stacked, FLOOR, out=logs), out=logs)
        np.dot(stacked, logs.T, out=self._products)
        larger = np.maximum(stacked[0], stacked[1], out=logs[0]).sum()
        inputs[-7:-1] = (larger, context, temperature, top_p, *self._passes[at])

        x = self._first @ inputs
        np.multiply(x, ndtr(x), out=self._hidden[:-1])  # GELU: x times the normal cdf
        x = self._second @ self._hidden
        x = self._third @ (x * ndtr(x))
        x += self._offset[at]
        return x


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy().copy()
