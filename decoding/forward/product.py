"""Products of a pass's rows with weight matrices: torch's own, or oneDNN's for large matrices."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.forward.fusing import fused_linear, plain_linears

LARGE = 1 << 19
"""Numbers in a matrix from which on it may be multiplied by oneDNN.

Smaller ones lie in the caches, where torch's own way is as fast.
"""


class Linear:
    """One product for several linear layers over the same input.

    Their weights become views of the fused one, so that there is no second copy, and a change in
    place is seen here.

    Attributes:
        tensors: what is multiplied, as far as torch can read it.
        samples: a few numbers of each matrix that was packed, as views of the layers' own.
        copies: as a norm's; there are none.
    """

    samples: Sequence[Tensor] = ()
    copies: Sequence[tuple[Tensor, Tensor]] = ()

    def __init__(self, parts: Sequence[nn.Module]):
        self.weight, self.bias = fused_linear(parts)
        self.tensors = [each for each in (self.weight, self.bias) if each is not None]

    def __call__(self, states: Tensor) -> Tensor:
        """Multiply states [..., in] by the matrix and add the bias: [..., out]."""
        return F.linear(states, self.weight, self.bias)


def linear(parts: Sequence[nn.Module], way: str = "plain") -> Linear:
    """Make the product for linear layers, in one of the ways of `onednn`."""
    if way == "plain" or sum(part.weight.numel() for part in plain_linears(parts)) < LARGE:
        return Linear(parts)
    from nde_talf.decoding.forward.onednn import OneDNNLinear, PackedLinear

    return PackedLinear(parts) if way == "packed" else OneDNNLinear(parts)
