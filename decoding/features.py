"""Scalar statistics of p and q that a selector may see at a root (Appendix E, NDE paper).

All are available before the target has run on the root. Traces store them offline, the neural
policy computes them online, through this one function.

The rows p and q are those that tokens are drawn from, but at temperature 0 unwarped ones
(`sampling_setting.feature_setting`): there a warped row is one token, so that all entropies would
be 0, and all divergences one of two numbers.
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
FLOOR = 1e-10  # truncated distributions have zeros: divergences are capped near -log of this


def scalar_features(p_previous: Tensor, q_previous: Tensor, q_root: Tensor) -> Tensor:
    """Compute six numbers [..., 6] from distributions [..., V] at the root and before it.

    These are H(p_prev), H(q_prev), H(q_root), and at prev KL(p||q), KL(q||p) and ||p - q||_1.
    """
    rows = torch.stack([p_previous, q_previous, q_root], -2)
    sums = rows @ rows.clamp(min=FLOOR).log().mT  # of x log y for each pair (x, y)
    own = sums.diagonal(dim1=-2, dim2=-1)
    divergences = own[..., :2] - sums.flatten(-2)[..., 1:4:2]  # the sums of (p, q) and (q, p)
    l1 = (p_previous - q_previous).abs().sum(-1, keepdim=True)
    return torch.cat([-own, divergences, l1], -1)
