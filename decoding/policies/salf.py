"""Optimal tree search and SALF, stopping at low further gains (Algorithm 2, SALF & TALF paper)."""

import heapq

from decoding.drafter import Drafter
from decoding.policies.base import DecodingState, require_fractions, require_positive
from decoding.policies.beam import Candidate, children, reranked
from decoding.sampling import Rng
from decoding.tree import DraftTree

ROOT = Candidate(1.0, 0, -1, -1)


class Salf:
    """The `nodes` tokens of highest path probability, found by expanding the `batch` most probable at a time, until those that
    could still matter have a probability sum below `threshold`.

    threshold 0 is SpecExec's optimal search: the tree holds the most probable nodes of all (Theorem 3). `gains` are the
    sums S_i of the last draft; they fall from pass to pass (Theorem 1). Tokens that are known when drafting stops fill the
    tree: they cost no further draft pass.
    """

    trees = "top_k"

    def __init__(self, nodes: int = 60, batch: int = 10, threshold: float = 0.6):
        require_positive(nodes=nodes, batch=batch)
        require_fractions(threshold=threshold)
        self.nodes, self.batch, self.threshold = nodes, batch, threshold
        self.gains: list[float] = []

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        tree, gains = DraftTree.rooted(state.root, drafter.root.q), list[float]()
        self.gains = gains
        if not state.room:
            return tree
        found: list[Candidate] = []  # G: popped, the root left out
        queue = [ROOT]  # Q: not expanded, most probable first
        while True:
            popped, queue = queue[: self.batch], queue[self.batch :]
            found = heapq.nlargest(self.nodes, found + [c for c in popped if c.parent >= 0])
            least = found[-1].probability if len(found) == self.nodes else 0.0
            matter = [c for c in popped if c.probability > least]
            gains.append(sum(c.probability for c in matter))
            if not matter or gains[-1] < self.threshold:
                break
            nodes = [(tree.add(c.parent, c.token) if c.parent >= 0 else 0, c.probability) for c in matter]
            if nodes[0][0]:  # the root has been expanded when it was committed
                drafter.expand(tree, [node for node, _ in nodes])
            known = heapq.nlargest(self.nodes, found + queue)
            enough = known[-1].probability if len(known) == self.nodes else 0.0  # below, none is among them
            grown = children(tree, nodes, self.nodes, enough)
            found += [c for c in grown if -c.above == state.room]  # as deep as the context allows
            queue = heapq.nlargest(self.nodes, queue + [c for c in grown if -c.above < state.room])
        return reranked(tree, heapq.nlargest(self.nodes, found + queue), drafter)


class Optimal(Salf):
    """SpecExec's search: the `nodes` most probable tokens, `batch` expanded at a time."""

    def __init__(self, nodes: int = 60, batch: int = 10):
        super().__init__(nodes, batch, threshold=0.0)
