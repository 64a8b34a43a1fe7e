"""Naive and NaiveTree: speculative sampling of the first draw alone."""

from nde_talf.decoding.registry import IID, PATHS
from nde_talf.decoding.rules.specinfer import SpecInfer
from nde_talf.decoding.rules.walk import rule


@rule("naive", PATHS)
@rule("naivetree", IID, labels=True)
class Naive(SpecInfer):
    """Algorithm 2, NDE paper: accept the first draw with min(1, p / q), else t ~ norm((p - q)_+).

    On one path it is speculative sampling; on a tree (NaiveTree) the residual may still land on
    another draw.
    """

    offered = 1
