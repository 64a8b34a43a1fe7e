"""Beam search with re-ranking (EAGLE-2; Figure 4a of the SALF & TALF paper)."""

import heapq

from decoding.drafter import Drafter
from decoding.policies.base import DecodingState
from decoding.policies.beam_unread import search
from decoding.policies.chosen import Candidate, children, kept
from decoding.policies.limits import require_positive
from decoding.ranked import RankedTree
from decoding.sampling import Rng
from decoding.tree import DraftTree


class Beam:
    """At every level the k most probable nodes of the level are expanded into their k most probable children; of all tokens
    seen in `depth` levels the `nodes` most probable are kept."""

    trees = "chosen"

    def __init__(self, k: int = 10, depth: int = 7, nodes: int = 60):
        require_positive(k=k, depth=depth, nodes=nodes)
        self.k, self.depth, self.nodes = k, depth, nodes

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | RankedTree:
        if state.unread:
            return search(self.k, min(self.depth, state.room), self.nodes, state.root, drafter)
        tree = DraftTree.rooted(state.root, drafter.root.q)
        level, seen = [(0, 1.0)], list[Candidate]()
        for depth in range(min(self.depth, state.room)):
            if depth:
                drafter.expand(tree, [node for node, _ in level])
            grown = children(tree, level, self.k)
            seen += grown
            level = [(tree.add(c.parent, c.token), c.probability) for c in heapq.nlargest(self.k, grown)]
        return kept(tree, heapq.nlargest(self.nodes, seen), drafter)
