"""SpecInfer: try the draws one after another, each against what is left of p."""

from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.registry import DISTINCT, IID
from nde_talf.decoding.rules.residual import Residual, accept, excess, reject
from nde_talf.decoding.rules.sums import hit_rates
from nde_talf.decoding.rules.walk import Rule, rule


@rule("specinfer", IID, labels=True)
@rule("without_replacement", DISTINCT)
class SpecInfer(Rule):
    """Algorithm 4, NDE paper.

    Round i accepts x with min(1, p_i(x) / q(x)), and p_{i+1} = norm((p_i - q)_+). So p_i = (p - c_i
    q)_+ / z_i with a scalar c_i. With draws without replacement the draft's mass shrinks too
    (DySpec, Sequoia). Draft order is as lossless as the paper's random order, with the same
    acceptance rate.
    """

    # The residual has no mass at a draw that was rejected.
    can_hit_draft = False
    tabled = True

    def chance(self, px: Any, qx: Any, state: Residual, left: Any = None) -> Any:
        """Return min(1, (p(x) - c q(x))_+ / (z q(x)))."""
        return accept(px, qx, state, 1.0, left)

    def reject(self, node: Any, state: Residual, left: Any = None) -> Residual:
        """Return c + z, and the mass of (p - c q)_+ there."""
        return reject(node, state, 1.0, left)

    def residual(self, node: Any, state: Residual) -> Any:
        """Return (p - c q)_+."""
        return node.rest(state.c)

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Residual) -> Tensor:
        """Return 1 - z_k = sum_t min(p, c_k q) for the draws that are offered (Algorithm 9).

        The residual hits the others with sum_t (p - c q)_+ (1 - (1 - q)^j), where j is how many
        they are (Algorithm 7 has this for Naive, with c = 1).
        """
        accepted, offered = 1 - states.z, states.z.shape[1] - 1
        if offered == int(draws.max()):
            return accepted
        others = (draws - offered).clamp(min=0)
        hits = hit_rates(p, q, others, lambda p, q, rows: excess(p, q, states.c[rows, offered]))
        return torch.cat([accepted, accepted[:, -1:] + hits[:, 1:]], -1)
