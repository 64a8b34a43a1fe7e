"""Naive speculative sampling (NSS), and greedy matching, its special case at temperature 0."""

import math
from typing import Any

from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import EVERY
from nde_talf.decoding.rules.residual import Residual
from nde_talf.decoding.rules.sums import hit_rates
from nde_talf.decoding.rules.walk import Rule, rule


@rule("nss", EVERY, labels=True)
class NSS(Rule):
    """Algorithm 1, NDE paper: t ~ p, whatever was drafted.

    It does not look at how children came about, so it is lossless on every tree.
    """

    offered = 0
    tabled = True

    def residual(self, node: Any, state: Residual) -> Any:
        """Return p."""
        return self.target(node.p)

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Residual) -> Tensor:
        """Return sum_t p (1 - (1 - q)^k) (Algorithm 6)."""
        return hit_rates(p, q, draws, lambda p, q, rows: p)


@rule("greedy", EVERY)
class Greedy(NSS):
    """NSS where p is one-hot at every node visited, and an error elsewhere."""

    tabled = False

    def target(self, p: Tensor) -> Tensor:
        """Return p [V].

        Raises UserError for one above temperature 0, ValueError where it is NaN.
        """
        top = float(p.max())
        if math.isnan(top):
            raise ValueError("weights: the target's distribution is NaN")
        if top < 1 - 1e-6:
            raise UserError(
                "verifier=greedy takes temperature 0 only; use nss, which is lossless on any tree."
            )
        return p
