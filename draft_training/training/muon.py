"""Muon (Jordan et al. 2024), which computes in float32 where bfloat16 is emulated.

torch.optim.Muon computes in bfloat16 alone: on AVX2 a step of the default target takes 8.8 s with
it, and 0.16 s with this one.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration
STEPS, MOMENTUM = 5, 0.95


def orthogonalised(matrices: Tensor, bfloat16: bool) -> Tensor:
    """Approximate U V^T of each of `matrices` [n, rows, columns] = U S V^T by Newton-Schulz.

    bfloat16: compute in it, not in float32.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16 if bfloat16 else torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(Optimizer):
    """Orthogonalised Nesterov momentum for matrices [rows, columns].

    Matrices of one shape are orthogonalised together. bfloat16: see `orthogonalised`.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, bfloat16: bool = False):
        super().__init__(params, {"lr": lr})
        self._bfloat16 = bfloat16

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for (rows, columns), parameters in by_shape.items():
                updates = torch.stack([self._momentum(p) for p in parameters])
                scale = -group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_add_(
                    parameters, list(orthogonalised(updates, self._bfloat16).unbind()), alpha=scale
                )

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
        return parameter.grad.lerp(buffer, MOMENTUM)
