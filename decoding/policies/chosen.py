"""Growing trees of the most probable tokens: children are picked, not drawn, so only NSS (or greedy matching) is lossless.

A candidate is a drafted token with the product of the draft's probabilities along its path; it becomes a node when it is
expanded or kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from decoding.drafter import Drafter
from decoding.tree import DraftTree


class Candidate(NamedTuple):
    """token under node `parent`; probability: of the whole path under the draft. Ordered by it, shallower first."""

    probability: float
    above: int  # minus the depth: of equally probable ones a parent comes before its child
    parent: int
    token: int


def top_tokens(rows: list[Tensor], count: int) -> list[list[tuple[float, int]]]:
    """The `count` most probable (probability, token) of each of `rows` [V], with one transfer from the device for all."""
    values, tokens = torch.stack(rows).topk(min(count, rows[0].shape[-1]), -1)
    return [list(zip(*line, strict=True)) for line in zip(values.double().tolist(), tokens.tolist(), strict=True)]


def children(tree: DraftTree, nodes: list[tuple[int, float]], count: int, above: float = 0.0) -> list[Candidate]:
    """The `count` most probable children of each of `nodes` (node, path probability), as far as their own path probability is
    larger than `above`."""
    found = []
    for (node, own), line in zip(nodes, top_tokens([tree.q[node] for node, _ in nodes], count), strict=True):
        for value, token in line:  # in falling order
            if own * value <= above:
                break
            found.append(Candidate(own * value, -tree.depth[node] - 1, node, token))
    return found


def kept(tree: DraftTree, chosen: list[Candidate], drafter: Drafter) -> DraftTree:
    """The tree of the root and the `chosen` candidates alone, whose parents are the root or chosen too; the drafter keeps
    what it computed for its nodes."""
    nodes = [0, *(tree.add(c.parent, c.token) for c in sorted(chosen, key=lambda c: (-c.above, -c.probability)))]
    drafter.relabel(nodes)
    return tree.of(nodes)
