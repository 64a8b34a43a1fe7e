"""A selector's choice at one root with few operations: the decode loop's form on a CPU.

At batch size 1 what takes time is the number of operations, not their size. The standardisation,
the layer norms' means and gains and all biases are folded into few matrices, and most operations
are NumPy's, which start quicker than torch's.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nde_talf.decoding.features import FLOOR, FROM_PRODUCTS
from nde_talf.selector.latency import StepCosts
from nde_talf.selector.network import Selector


class FastSelector:
    """The argmax of a `Selector` at one root, priced by `costs`; equal to it up to rounding."""

    @torch.no_grad()
    def __init__(self, selector: Selector, costs: StepCosts):
        network, schema, self._costs = selector.network.cpu().float(), selector.schema, costs
        (weight, bias), self._second, self._third = (
            (layer.weight.numpy(), layer.bias.numpy())
            for layer in network.mlp
            if isinstance(layer, nn.Linear)
        )
        # A layer norm takes the mean over the outputs away: so does a centred projection.
        self._projections = [
            (
                (layer.weight - layer.weight.mean(0)).numpy(),
                (layer.bias - layer.bias.mean()).numpy(),
            )
            for layer in network.projections.modules()
            if isinstance(layer, nn.Linear)
        ]
        norms = [norm for norm in network.projections.modules() if isinstance(norm, nn.LayerNorm)]
        gains = np.concatenate([norm.weight.numpy() for norm in norms]) * schema.width**0.5
        shifts = np.concatenate([norm.bias.numpy() for norm in norms])
        self._width, self._epsilon = schema.width, np.float32(schema.width * norms[0].eps)
        of_states, of_scalars = np.split(weight, [len(gains)], axis=1)
        of_scalars = of_scalars * selector.scale.cpu().numpy()
        of_products = of_scalars[:, :5] @ FROM_PRODUCTS.numpy()
        bias = bias + of_states @ shifts - of_scalars @ selector.mean.cpu().numpy()
        parts = [of_states * gains, of_products, of_scalars[:, 5:], bias[:, None]]
        self._first = np.concatenate(parts, 1, dtype=np.float32)
        prices = costs.seconds.log() if schema.sharpness else torch.zeros_like(costs.seconds)
        self._prices, self._passes = prices.numpy(), costs.passes.tolist()

    def logits(
        self,
        states: Sequence[Tensor],
        rows: Sequence[Tensor],
        context: int,
        temperature: float,
        top_p: float,
    ) -> np.ndarray:
        """[C]: the selector's logits, over its sharpness where there is one.

        Args:
            states: h_p_previous [H_p], h_q_previous [H_q], h_q_root [H_q]; the first is left out
                where the selector does not look at the target.
            rows: p_prev, q_prev, q_root, each [V].
            context: committed tokens.
            temperature: the target's.
            top_p: the target's.
        """
        states = states[3 - len(self._projections) :]
        projected = [
            weight @ state.float().numpy() + bias
            for state, (weight, bias) in zip(states, self._projections, strict=True)
        ]
        x = np.concatenate(projected).reshape(-1, self._width)
        x /= np.sqrt(np.add.reduce(x * x, 1, keepdims=True) + self._epsilon)
        p = torch.stack([row.float() for row in rows]).numpy()
        products = p @ np.log(np.maximum(p, FLOOR)).T
        l1, at = np.add.reduce(np.abs(p[0] - p[1])), self._costs.row(context)
        local = np.array((l1, context, temperature, top_p, *self._passes[at], 1), np.float32)
        x = _gelu(self._first @ np.concatenate([x.ravel(), products.ravel(), local]))
        (weight, bias), (last_weight, last_bias) = self._second, self._third
        return last_weight @ _gelu(weight @ x + bias) + last_bias - self._prices[at]


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 + 0.5 * torch.erf(torch.from_numpy(x * np.float32(0.5**0.5))).numpy())
