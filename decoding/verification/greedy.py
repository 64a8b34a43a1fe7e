"""Greedy matching: follow the target's greedy token while it is in the tree. For temperature 0, on any tree."""

import math

from decoding.common.errors import UserError
from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict


def greedy(tree: DraftTree, rng: Rng) -> Verdict:
    """Raises UserError unless p is one-hot at every node visited: above temperature 0 this rule would be biased; ValueError
    where p is NaN."""
    node, path = 0, []
    while True:
        top, token = tree.p[node].max(-1)
        if math.isnan(top):
            raise ValueError("weights: the target's distribution is NaN")
        if float(top) < 1 - 1e-6:
            raise UserError("verifier=greedy takes temperature 0 only; use nss, which is lossless on any tree.")
        child = next((child for child in tree.children[node] if tree.tokens[child] == int(token)), None)
        if child is None:
            return Verdict(path, int(token))
        node = child
        path.append(child)
