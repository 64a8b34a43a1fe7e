"""The selector's network (Eq. 10, NDE paper): three hidden states projected to a shared width, scalars beside them."""

import torch
from torch import Tensor, nn


class SelectorNetwork(nn.Module):
    """MLP([LN(phi_1 h_p_previous); LN(phi_2 h_q_previous); LN(phi_3 h_q_root); s(x)]) -> one logit for each tree."""

    def __init__(
        self,
        target_hidden: int,
        draft_hidden: int,
        scalars: int,
        outputs: int,
        width: int = 128,
        hidden: tuple[int, int] = (512, 32),
        dropout: float = 0.1,
    ):
        super().__init__()
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(size, width), nn.LayerNorm(width)) for size in (target_hidden, draft_hidden, draft_hidden)
        )
        self.mlp = nn.Sequential(
            nn.Linear(3 * width + scalars, hidden[0]),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden[0], hidden[1]),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden[1], outputs),
        )

    def forward(self, h_p_previous: Tensor, h_q_previous: Tensor, h_q_root: Tensor, scalars: Tensor) -> Tensor:
        """h_p_previous [B, H_p], h_q_previous and h_q_root [B, H_q], standardised scalars [B, S] -> logits [B, A]."""
        states = (h_p_previous, h_q_previous, h_q_root)
        projected = [project(h) for project, h in zip(self.projections, states, strict=True)]
        return self.mlp(torch.cat([*projected, scalars], -1))
