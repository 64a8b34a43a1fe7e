"""Beam search with re-ranking: trees of the most probable tokens.

Source: EAGLE-2; Figure 4a of the SALF & TALF paper. Other policies that pick tokens use its
functions.

Such children are picked, not drawn, so only NSS (or greedy matching) is lossless. A candidate is a
drafted token with the product of the draft's probabilities along its path. It becomes a node when
it is expanded, or when it is among the best in the end.
"""

import heapq
import math
from typing import NamedTuple

from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree


class Candidate(NamedTuple):
    """token under node `parent`; score: log probability of the full path under the draft.

    Ordered by it, shallower first.
    """

    score: float
    above: int  # minus the depth: of equally probable ones a parent comes before its child
    parent: int
    token: int


def top_tokens(tree: DraftTree, nodes: list[int], count: int) -> list[list[tuple[float, int]]]:
    """Return the `count` most probable (probability, token) after each of `nodes`.

    All rows take one transfer from the device.
    """
    rows = tree.q_rows(nodes)
    values, tokens = rows.topk(min(count, rows.shape[-1]), -1)
    return [
        list(zip(*line, strict=True))
        for line in zip(values.double().tolist(), tokens.tolist(), strict=True)
    ]


def children(
    tree: DraftTree, nodes: list[tuple[int, float]], count: int, above: float = -math.inf
) -> list[Candidate]:
    """List the `count` most probable children of each of `nodes` (node, score of its path).

    Only children with a score above `above` count, none of probability 0.
    """
    candidates = []
    lines = top_tokens(tree, [node for node, _ in nodes], count)
    for (node, path), line in zip(nodes, lines, strict=True):
        for value, token in line:  # in falling order
            score = path + math.log(value) if value > 0 else -math.inf
            if score <= above:
                break
            candidates.append(Candidate(score, -tree.depth[node] - 1, node, token))
    return candidates


def reranked(tree: DraftTree, best: list[Candidate], drafter: Drafter) -> DraftTree:
    """Build the tree of the root and the `best` candidates alone.

    Their parents are the root or among the best too. The drafter drops its states of other nodes.
    """
    nodes = [
        0,
        *(tree.add(c.parent, c.token) for c in sorted(best, key=lambda c: (-c.above, -c.score))),
    ]
    drafter.rerank(nodes)
    small, numbers = DraftTree.rooted(tree.tokens[0], tree.q[0]), {0: 0}
    for node in nodes[1:]:
        numbers[node] = small.add(numbers[tree.parents[node]], tree.tokens[node])
        small.q[-1] = tree.q[node]
    return small


@policy("beam", verifier="nss")
class Beam(TreePolicy):
    """Beam search that keeps the `nodes` most probable of all tokens seen in `depth` levels.

    At every level the k most probable nodes are expanded into their k most probable children.
    """

    trees = "top_k"

    @checked
    def __init__(self, k: Positive = 10, depth: Positive = 7, nodes: Positive = 60):
        self.k, self.depth, self.nodes = k, depth, nodes

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft a tree of the most probable tokens; `rng` is not used."""
        tree = DraftTree.rooted(state.root, drafter.root.q)
        level, seen = [(0, 0.0)], list[Candidate]()
        for at in range(min(self.depth, state.room)):
            if at:
                drafter.expand(tree, [node for node, _ in level])
            grown = children(tree, level, self.k)
            seen += grown
            level = [(tree.add(c.parent, c.token), c.score) for c in heapq.nlargest(self.k, grown)]
        return reranked(tree, heapq.nlargest(self.nodes, seen), drafter)
