"""The one-parameter residual family all sequential rules share.

Every residual target met while children of a node are rejected one by one is (w0 p - c q)_+ / Z with a scalar c, so a
node's state is (c, Z, D) and one fused reduction a rejection; no residual vector is kept.

With i.i.d. children and m of them rejected: c_0 = 0, Z_0 = w0, D_0 = 1; c_{m+1} = c_m + D_m;
Z_{m+1} = sum_t (w0 p(t) - c_{m+1} q(t))_+; D_{m+1} = Z_{m+1} + 1 - w0. The next child x has weight
min(1, (w0 p(x) - c_m q(x))_+ / (D_m q(x))). SpecInfer is w0 = 1; block and traversal verification carry w0 down.
"""

import torch
from torch import Tensor


class Residual:
    """State of one node as its children are rejected. p, q: [V]; w0 in [0, 1]: the weight the node arrived with."""

    def __init__(self, p: Tensor, q: Tensor | None, w0: float = 1.0):
        self.p, self.q, self.w0 = p, q, w0
        self.c, self.z, self.d = 0.0, w0, 1.0

    def weight(self, token: int) -> float:
        """Weight in [0, 1] of a next child drawn as `token`."""
        q = float(self.q[token])
        left = self.w0 * float(self.p[token]) - self.c * q
        if left <= 0:
            return 0.0
        scale = self.d * q
        return 1.0 if left >= scale else left / scale

    def reject(self) -> None:
        """Account for one more rejected child, a repeated one too."""
        self.c += self.d
        self.z = float(self.positive_part().sum(dtype=torch.float64))
        self.d = self.z + 1 - self.w0

    def positive_part(self) -> Tensor:
        """(w0 p - c q)_+, [V]: the residual target up to its normalisation."""
        if self.c == 0:
            return self.p
        return (self.w0 * self.p).sub_(self.q, alpha=self.c).clamp_(min=0)

    def target(self) -> Tensor:
        """Weights [V] to draw the correction token from: the positive part, or p itself where rounding (p = q) left
        no mass, a case of probability zero."""
        residual = self.positive_part()
        return residual if self.c == 0 or float(residual.sum()) > 1e-12 else self.p
