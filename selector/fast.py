"""One choice of a trained selector on a CPU, in as little time as it takes: what the decode loop calls at every step there."""

import numpy as np
import torch
from torch import Tensor

from decoding.features import FROM_PRODUCTS
from selector.latency import StepCosts
from selector.selector import Selector


class FastSelector:
    """The argmax of a `Selector` at one root, in evaluation mode, priced by `costs`; `logits` [C] are those of the last choice,
    over the sharpness where there is one.

    Behind the models' passes nothing of it is in cache, and what takes time is how much code runs, not how much it computes:
    so it is one compiled function. Standardisation, the layer norms' centring and scales, the linear part of the scalar
    features and all biases are folded into the weights. Equal to the selector's own forward pass up to rounding.
    """

    @torch.no_grad()
    def __init__(self, selector: Selector, costs: StepCosts):
        from selector import compiled  # not above: an engine of vLLM cannot start in a process that has imported numba

        self._choose = compiled.choose
        network, schema, self._costs = selector.network.cpu().float(), selector.schema, costs
        first, second, third = network.mlp[0], network.mlp[3], network.mlp[6]
        width = schema.width
        # A layer norm takes the mean over the outputs away; its root mean square is then the norm over sqrt(width).
        centred = [[part - part.mean(0) for part in (p[0].weight, p[0].bias[:, None])] for p in network.projections]
        projections = tuple(_array(torch.cat(parts, 1) / width**0.5) for parts in centred)

        states, scalars = first.weight[:, : 3 * width], first.weight[:, 3 * width :] * selector.scale.cpu()
        gains = torch.cat([p[1].weight for p in network.projections]) * width**0.5
        shifts = torch.cat([p[1].bias for p in network.projections])
        # The L1 distance of two distributions is twice the sum of their larger entries, less 2.
        bias = first.bias + states @ shifts - scalars @ selector.mean.cpu() - 2 * scalars[:, 5]
        scalars = [scalars[:, :5] @ FROM_PRODUCTS, 2 * scalars[:, 5:6], scalars[:, 6:]]
        layers = [torch.cat([states * gains, *scalars, bias[:, None]], 1)]
        layers += [torch.cat([layer.weight, layer.bias[:, None]], 1) for layer in (second, third)]

        prices = costs.seconds.log() if schema.sharpness else torch.zeros_like(costs.seconds)
        self._prices, self._passes = list(_array(prices)), costs.passes.tolist()
        self.logits = np.empty(prices.shape[1], np.float32)
        inputs = np.empty(layers[0].shape[1] - 1, np.float32)
        self._folded = network.projections[0][1].eps, projections, tuple(map(_array, layers)), inputs, self.logits
        row = torch.full((2,), 0.5)
        self.choose((torch.zeros(schema.target_hidden), *[torch.zeros(schema.draft_hidden)] * 2), (row,) * 3, 1, 1.0, 1.0)

    def choose(
        self, states: tuple[Tensor, ...], rows: tuple[Tensor, ...], context: int, temperature: float, top_p: float
    ) -> int:
        """The option's index. states: h_p_previous, h_q_previous, h_q_root [H]; rows: p_prev, q_prev, q_root [V]."""
        (h0, h1, h2), (p0, q0, q1), at = map(_floats, states), map(_floats, rows), self._costs.row(context)
        local = (float(context), float(temperature), float(top_p), *self._passes[at])
        return self._choose((h0, h1, h2), (p0, q0, q1), local, self._prices[at], *self._folded)


def _floats(tensor: Tensor) -> np.ndarray:
    return tensor.float().numpy()


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy().copy()
