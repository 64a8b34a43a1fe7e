"""Growing trees of the most probable tokens: children are picked, not drawn, so only NSS (or greedy matching) is lossless.

A candidate is a drafted token with the product of the draft's probabilities along its path; it becomes a node when it is
expanded or kept.
"""

from typing import NamedTuple

import torch

from decoding.drafter import Drafter
from decoding.tree import DraftTree


class Candidate(NamedTuple):
    """token under node `parent`; probability: of the whole path under the draft. Ordered by it, shallower first."""

    probability: float
    above: int  # minus the depth: of equally probable ones a parent comes before its child
    parent: int
    token: int


def children(tree: DraftTree, nodes: list[tuple[int, float]], count: int) -> list[Candidate]:
    """The `count` most probable children of each of `nodes` (node, path probability); those of probability 0 left out. One
    transfer from the device for all."""
    rows = torch.stack([tree.q[node] for node, _ in nodes])
    values, tokens = rows.topk(min(count, rows.shape[-1]), -1)
    return [
        Candidate(own * value, -tree.depth[node] - 1, node, token)
        for (node, own), row, ids in zip(nodes, values.double().tolist(), tokens.tolist(), strict=True)
        for value, token in zip(row, ids, strict=True)
        if own * value > 0
    ]


def kept(tree: DraftTree, chosen: list[Candidate], drafter: Drafter) -> DraftTree:
    """The tree of the root and the `chosen` candidates alone, whose parents are the root or chosen too; the drafter keeps
    what it computed for its nodes."""
    nodes = [0, *(tree.add(c.parent, c.token) for c in sorted(chosen, key=lambda c: (-c.above, -c.probability)))]
    drafter.relabel(nodes)
    return tree.of(nodes)
