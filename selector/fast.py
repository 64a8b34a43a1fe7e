"""One choice of a trained selector with as few operations as it takes: what the decode loop calls at every step."""

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.features import FROM_PRODUCTS, raw_features
from selector.latency import StepCosts
from selector.selector import Selector


class FastSelector:
    """The argmax of a `Selector` at one root, in evaluation mode, priced by `costs`; on the device of the selector.

    Standardisation, the layer norms' scales and the linear part of the scalar features are folded into the first layer of the
    MLP, and what depends on context and setting alone is kept for as long as these stay. Equal to the selector's own forward
    pass up to rounding.
    """

    @torch.no_grad()
    def __init__(self, selector: Selector, costs: StepCosts):
        network, self.costs = selector.network, costs
        self.device = network.mlp[-1].weight.device
        self.projections = [(p[0].weight.detach(), p[0].bias.detach()) for p in network.projections]
        self.width = selector.schema.width
        first, second, third = network.mlp[0], network.mlp[3], network.mlp[6]
        states, scalars = first.weight[:, : 3 * self.width], first.weight[:, 3 * self.width :] * selector.scale
        gains = torch.cat([p[1].weight for p in network.projections])
        shifts = torch.cat([p[1].bias for p in network.projections])
        bias = first.bias + states @ shifts - scalars @ selector.mean
        self.weight = torch.cat([states * gains, scalars[:, :5] @ FROM_PRODUCTS.to(scalars), scalars[:, 5:6]], 1).contiguous()
        self.bias = bias.detach()
        self._per_token = scalars[:, 6].contiguous()  # of context
        self._local_weight = scalars[:, 7:].contiguous()  # temperature, top-p and the two latencies
        self._local: dict[tuple[int, float, float], Tensor] = {}
        self.layers = [(layer.weight.detach(), layer.bias.detach()) for layer in (second, third)]
        self.epsilon = network.projections[0][1].eps
        sharpness = selector.schema.sharpness
        self._log_seconds = costs.seconds.log().to(self.device) if sharpness else None

    def choose(
        self,
        h_p_previous: Tensor,
        h_q_previous: Tensor,
        h_q_root: Tensor,
        distributions: Tensor,
        context: int,
        temperature: float,
        top_p: float,
    ) -> int:
        """The option's index. Hidden states [H]; distributions [3, V]: p_prev, q_prev, q_root."""
        return int(self.values(h_p_previous, h_q_previous, h_q_root, distributions, context, temperature, top_p).argmax())

    def values(self, h_p_previous, h_q_previous, h_q_root, distributions, context, temperature, top_p) -> Tensor:
        """The logits [C], over the sharpness where there is one."""
        row = self.costs.row(context)
        bias = torch.add(self._local_bias(row, temperature, top_p), self._per_token, alpha=context)
        states = (h_p_previous, h_q_previous, h_q_root)
        projected = [torch.addmv(b, w, h.to(w)) for (w, b), h in zip(self.projections, states, strict=True)]
        normed = F.layer_norm(torch.stack(projected), (self.width,), eps=self.epsilon)
        products, l1 = raw_features(distributions)
        x = torch.cat([normed.flatten(), products, l1[None]])
        x = torch.addmv(bias, self.weight, x)
        for weight, shift in self.layers:
            x = torch.addmv(shift, weight, F.gelu(x))
        return x if self._log_seconds is None else x - self._log_seconds[row]

    def _local_bias(self, row: int, temperature: float, top_p: float) -> Tensor:
        """The first layer's bias with what changes once in many steps."""
        bias = self._local.get((row, temperature, top_p))
        if bias is None:
            local = torch.tensor([temperature, top_p, *self.costs.passes[row].tolist()], device=self.device)
            bias = self._local[row, temperature, top_p] = torch.addmv(self.bias, self._local_weight, local)
        return bias
