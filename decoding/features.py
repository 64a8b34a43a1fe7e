"""What a selector may know at a root (Appendix E, paper 000): scalar statistics of p and q, all available before the
target has run on the root. Traces store them offline, the neural policy computes them online, through this one function.
"""

import torch
from torch import Tensor

# In the order of `scalar_features`; entropies and divergences in nats.
SCALARS = (
    "entropy_p_previous",
    "entropy_q_previous",
    "entropy_q_root",
    "kl_p_q_previous",
    "kl_q_p_previous",
    "l1_previous",
)
_FLOOR = 1e-10  # truncated distributions have zeros: divergences are capped near -log of this


def scalar_features(p_previous: Tensor, q_previous: Tensor, q_root: Tensor) -> Tensor:
    """[..., 6] of distributions [..., V]: H(p_prev), H(q_prev), H(q_root), KL(p||q), KL(q||p), ||p - q||_1 at prev."""
    logs = [x.clamp(min=_FLOOR).log() for x in (p_previous, q_previous, q_root)]
    difference = logs[0] - logs[1]
    return torch.stack(
        [
            -(p_previous * logs[0]).sum(-1),
            -(q_previous * logs[1]).sum(-1),
            -(q_root * logs[2]).sum(-1),
            (p_previous * difference).sum(-1),
            -(q_previous * difference).sum(-1),
            (p_previous - q_previous).abs().sum(-1),
        ],
        -1,
    )
