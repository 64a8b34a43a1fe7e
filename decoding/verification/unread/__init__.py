"""Verification on the device: the rules' laws for trees that the host has not read.

A rule returns the last accepted node and the correction token, both [1]; a negative token says that it cannot go on there,
and the rule on the host says why.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from decoding.sampling import Rng
from decoding.unread import UnreadTree
from decoding.verification.unread.gbv import gbv
from decoding.verification.unread.khisti import khisti
from decoding.verification.unread.residual import residual_weights, specinfer, traversal
from decoding.verification.unread.solvers import greedy, naivetree, nss
from decoding.verification.unread.spectr import spectr

__all__ = ["UNREAD", "UnreadRule", "residual_weights"]

UnreadRule = Callable[[UnreadTree, Rng], tuple[Tensor, Tensor]]

# By the verifier's name. On a single path the Naive solver is SpecInfer's.
UNREAD: dict[str, UnreadRule] = {
    "nss": nss,
    "naive": specinfer,
    "naivetree": naivetree,
    "spectr": spectr,
    "specinfer": specinfer,
    "khisti": khisti,
    "bv": traversal,
    "traversal": traversal,
    "gbv": gbv,
    "without_replacement": partial(specinfer, distinct=True),
    "traversal_without_replacement": partial(traversal, distinct=True),
    "greedy": greedy,
}
