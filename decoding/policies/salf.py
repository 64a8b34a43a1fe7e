"""Optimal tree search and SALF, stopping at low further gains (Algorithm 2, SALF & TALF paper)."""

import heapq
import math

from nde_talf.decoding.common.arguments import Positive, Proper, checked
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.beam import Candidate, children, reranked
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree

ROOT = Candidate(0.0, 0, -1, -1)


@policy("salf", verifier="nss")
class Salf(TreePolicy):
    """Algorithm 2: expand the `batch` most probable nodes at a time, until they gain too little.

    It stops when the next ones have a probability sum below `threshold`.

    G are the nodes that were popped from the queue Q; the tree is the `nodes` most probable of G.
    It is smaller than `nodes` where the search stops early. For example, the defaults (the paper's)
    on a draft that is unsure expand the root, pop its ten best children, and stop before these are
    expanded: the tree holds these ten. threshold 0 is SpecExec's optimal search: the tree holds the
    most probable nodes of all (Theorem 3).

    Args:
        nodes: N, the largest number of drafted tokens; the root is not counted.
        batch: B, how many nodes are expanded in one draft pass.
        threshold: th.
    """

    trees = "top_k"

    @checked
    def __init__(self, nodes: Positive = 60, batch: Positive = 10, threshold: Proper = 0.6):
        self.nodes, self.batch, self.threshold = nodes, batch, threshold

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft one tree by Algorithm 2; `rng` is not used."""
        tree = DraftTree.rooted(state.root, drafter.root.q)
        candidates: list[Candidate] = []  # G without the root
        queue = [ROOT]  # Q: not expanded, most probable first
        while True:
            popped, queue = queue[: self.batch], queue[self.batch :]
            candidates = heapq.nlargest(
                self.nodes, candidates + [c for c in popped if c.parent >= 0]
            )
            epsilon = self._least(candidates)
            matter = [c for c in popped if c.score > epsilon]  # D
            # The sums S_i fall from pass to pass (Theorem 1).
            if not matter or sum(math.exp(c.score) for c in matter) < self.threshold:
                break
            # A node as deep as the context allows has no children.
            nodes = [
                (tree.add(c.parent, c.token) if c.parent >= 0 else 0, c.score)
                for c in matter
                if -c.above < state.room
            ]
            if not nodes:
                continue
            if nodes[0][0]:  # the root has been expanded when it was committed
                drafter.expand(tree, [node for node, _ in nodes])
            # below, none can come into the tree
            enough = self._least(heapq.nlargest(self.nodes, candidates + queue))
            queue = heapq.nlargest(self.nodes, queue + children(tree, nodes, self.nodes, enough))
        return reranked(tree, candidates, drafter)

    def _least(self, candidates: list[Candidate]) -> float:
        """Return the lowest score among the best candidates; -inf where some are missing."""
        return candidates[-1].score if len(candidates) == self.nodes else -math.inf


@policy("optimal", verifier="nss")
class Optimal(Salf):
    """SpecExec's search: the `nodes` most probable tokens, `batch` expanded at a time."""

    def __init__(self, nodes: int = 60, batch: int = 10):
        super().__init__(nodes, batch, threshold=0.0)
