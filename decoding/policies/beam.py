"""Beam search with re-ranking: trees of the most probable tokens, on host and device.

Source: EAGLE-2; Figure 4a of the SALF & TALF paper. Other policies that pick tokens use its
functions.

Such children are picked, not drawn, so only NSS (or greedy matching) is lossless. A candidate is a
drafted token with the product of the draft's probabilities along its path. It becomes a node when
it is expanded, or when it is among the best in the end.
"""

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree


class Candidate(NamedTuple):
    """token under node `parent`; probability: of the full path under the draft.

    Ordered by it, shallower first.
    """

    probability: float
    above: int  # minus the depth: of equally probable ones a parent comes before its child
    parent: int
    token: int


def top_tokens(rows: list[Tensor], count: int) -> list[list[tuple[float, int]]]:
    """Return the `count` most probable (probability, token) of each of `rows` [V].

    All rows take one transfer from the device.
    """
    values, tokens = torch.stack(rows).topk(min(count, rows[0].shape[-1]), -1)
    return [
        list(zip(*line, strict=True))
        for line in zip(values.double().tolist(), tokens.tolist(), strict=True)
    ]


def children(
    tree: DraftTree, nodes: list[tuple[int, float]], count: int, above: float = 0.0
) -> list[Candidate]:
    """List the `count` most probable children of each of `nodes` (node, path probability).

    Only children with a path probability larger than `above` count.
    """
    candidates = []
    for (node, reach), line in zip(
        nodes, top_tokens([tree.q_at(node) for node, _ in nodes], count), strict=True
    ):
        for value, token in line:  # in falling order
            if reach * value <= above:
                break
            candidates.append(Candidate(reach * value, -tree.depth[node] - 1, node, token))
    return candidates


def reranked(tree: DraftTree, best: list[Candidate], drafter: Drafter) -> DraftTree:
    """Build the tree of the root and the `best` candidates alone.

    Their parents are the root or among the best too. The drafter drops its states of other nodes.
    """
    nodes = [
        0,
        *(
            tree.add(c.parent, c.token)
            for c in sorted(best, key=lambda c: (-c.above, -c.probability))
        ),
    ]
    drafter.rerank(nodes)
    return tree.subtree(nodes)


@policy("beam", verifier="nss")
class Beam(TreePolicy):
    """Beam search that keeps the `nodes` most probable of all tokens seen in `depth` levels.

    At every level the k most probable nodes are expanded into their k most probable children.
    """

    trees = "top_k"

    @checked
    def __init__(self, k: Positive = 10, depth: Positive = 7, nodes: Positive = 60):
        self.k, self.depth, self.nodes = k, depth, nodes

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | DeviceTree:
        """Draft a tree of the most probable tokens; `rng` is not used."""
        depth = min(self.depth, state.room)
        if state.device:
            return self._on_device(depth, DeviceTree(state.root, drafter.root.q), drafter)
        tree = DraftTree.rooted(state.root, drafter.root.q)
        level, seen = [(0, 1.0)], list[Candidate]()
        for at in range(depth):
            if at:
                drafter.expand(tree, [node for node, _ in level])
            grown = children(tree, level, self.k)
            seen += grown
            level = [
                (tree.add(c.parent, c.token), c.probability) for c in heapq.nlargest(self.k, grown)
            ]
        return reranked(tree, heapq.nlargest(self.nodes, seen), drafter)

    def _on_device(self, depth: int, beam: DeviceTree, drafter: Drafter) -> DeviceTree:
        """Run the search on the device.

        It may pick different ones of equally probable candidates, and takes those of probability 0
        if there are too few others. The host knows how many nodes are expanded and how many
        candidates there are; the device knows which.

        `beam` holds the expanded nodes. Candidates are numbered as they are seen, the root first.
        None is more probable than its parent, so a stable sort by probability has parents before
        their children.
        """
        root = beam.tokens
        reach = torch.ones(
            1, dtype=torch.float64, device=root.device
        )  # of the nodes to expand: path probability
        number = torch.zeros_like(root)  # ... and which candidates they are
        seen, count = (
            [(reach + 1, root, number - 1)],
            1,
        )  # probability (the root's beyond all), token, parent
        for level in range(depth):
            q = beam.q_at(beam.tips)
            values, tokens = q.topk(min(self.k, q.shape[-1]), -1)
            values = values.double().nan_to_num(0.0).clamp(max=1)  # rounding may exceed 1
            grown = (reach[:, None] * values).flatten()
            seen.append((grown, tokens.flatten(), number[:, None].expand_as(tokens).flatten()))
            if level + 1 < depth:
                best = grown.argsort(descending=True, stable=True)[: self.k]
                beam.add(
                    tokens.flatten().index_select(0, best), best // tokens.shape[1] + beam.tips[0]
                )
                drafter.expand(beam, beam.tips)
                reach, number = grown.index_select(0, best), best + count
            count += len(grown)
        probability, token, parent = map(torch.cat, zip(*seen, strict=True))
        order = probability.argsort(descending=True, stable=True)
        best, rank = order[: self.nodes + 1], order.argsort()
        above = parent.index_select(0, best)
        above = torch.where(above < 0, -1, rank.index_select(0, above.clamp(min=0)))
        return beam.ranked(token.index_select(0, best), above, depth)
