"""One choice of a trained selector on a CPU, in as little time as it takes: what the decode loop calls at every step there."""

from math import sqrt

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

    Standardisation, the layer norms' centring and scales, and the linear part of the scalar features are folded into the
    first layer of the MLP, and what depends on context and setting alone is kept for as long as these stay. Equal to the
    selector's own forward pass up to rounding.
    """

    @torch.no_grad()
    def __init__(self, selector: Selector, costs: StepCosts):
        network, self.costs, width = selector.network.cpu().float(), costs, selector.schema.width
        first, second, third = network.mlp[0], network.mlp[3], network.mlp[6]
        states, scalars = first.weight[:, : 3 * width], first.weight[:, 3 * width :] * selector.scale.cpu()
        gains = torch.cat([p[1].weight for p in network.projections])
        shifts = torch.cat([p[1].bias for p in network.projections])
        # The L1 distance of two distributions is twice the sum of their larger entries, less 2.
        weight = [states * gains, scalars[:, :5] @ FROM_PRODUCTS, 2 * scalars[:, 5:6], scalars[:, 6:7]]
        self._weight = _array(torch.cat(weight, 1))
        self._bias = _array(first.bias + states @ shifts - scalars @ selector.mean.cpu() - 2 * scalars[:, 5])
        self._local_weight = _array(scalars[:, 7:])  # temperature, top-p and the two latencies
        # Centred already: a layer norm takes the mean over the outputs away.
        pairs = [(p[0].weight - p[0].weight.mean(0), p[0].bias - p[0].bias.mean()) for p in network.projections]
        self._projections = [(_array(weight), _array(bias)) for weight, bias in pairs]
        self._layers = [(_array(layer.weight), _array(layer.bias)) for layer in (second, third)]
        self._epsilon = network.projections[0][1].eps
        self._log_seconds = _array(costs.seconds.log()) if selector.schema.sharpness else None
        self._local: dict[tuple[int, float, float], np.ndarray] = {}
        self._width, self._inputs = width, np.empty(3 * width + 11, np.float32)
        self._products = self._inputs[3 * width : -2].reshape(3, 3)
        self._rows = self._logs = np.empty((3, 0), np.float32)

    def choose(
        self, states: tuple[Tensor, ...], rows: tuple[Tensor, ...], context: int, temperature: float, top_p: float
    ) -> int:
        """The option's index. states: h_p_previous, h_q_previous, h_q_root [H]; rows: p_prev, q_prev, q_root [V]."""
        return int(self.values(states, rows, context, temperature, top_p).argmax())

    def values(self, states, rows, context, temperature, top_p) -> np.ndarray:
        """The logits [C], over the sharpness where there is one."""
        at, inputs, width = self.costs.row(context), self._inputs, self._width
        for i, ((weight, bias), state) in enumerate(zip(self._projections, states, strict=True)):
            projected = np.dot(weight, state.float().numpy(), out=inputs[i * width : (i + 1) * width])
            projected += bias
            projected /= sqrt(projected @ projected / width + self._epsilon)
        if self._rows.shape[1] != len(rows[0]):
            self._rows, self._logs = (np.empty((3, len(rows[0])), np.float32) for _ in range(2))
        stacked, logs = self._rows, self._logs
        torch.stack(rows, out=torch.from_numpy(stacked))
        np.log(np.maximum(stacked, FLOOR, out=logs), out=logs)
        np.dot(stacked, logs.T, out=self._products)
        inputs[-2] = np.maximum(stacked[0], stacked[1], out=logs[0]).sum()
        inputs[-1] = context
        x = self._weight @ inputs
        x += self._local_bias(at, temperature, top_p)
        for weight, bias in self._layers:
            x = weight @ (x * ndtr(x))  # GELU: x times the normal cdf
            x += bias
        return x if self._log_seconds is None else x - self._log_seconds[at]

    def _local_bias(self, at: int, temperature: float, top_p: float) -> np.ndarray:
        """The first layer's bias with what changes once in many steps."""
        bias = self._local.get((at, temperature, top_p))
        if bias is None:
            local = np.array([temperature, top_p, *self.costs.passes[at].tolist()], np.float32)
            bias = self._local[at, temperature, top_p] = self._bias + self._local_weight @ local
        return bias


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy().copy()
