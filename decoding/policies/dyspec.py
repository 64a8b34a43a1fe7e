"""DySpec: children drawn without replacement where a draw is most likely to be accepted.

Source: Algorithms 1 and 2, DySpec paper.

The choice to draw at a node is made before the token is known: values are products of draft
probabilities of tokens drawn earlier. So the tree's law is what the without-replacement rule
assumes.
"""

import heapq

import torch
from torch import Tensor

from nde_talf.decoding.common.arguments import Positive, Proper, checked
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling.rng import LEAST_MASS, Rng
from nde_talf.decoding.tree import DraftTree


class Rest:
    """The draft's mass [V] of tokens not drawn yet at a node.

    `total` of it is left: all of the row before the first draw, then the float64 sum of what is
    drawn from.
    """

    def __init__(self, q: Tensor):
        self.total, self._mass = 1.0, q.clone()

    @property
    def empty(self) -> bool:
        """Return True if nothing is left to draw from."""
        return self.total < LEAST_MASS

    def draw(self, tree: DraftTree, node: int, rng: Rng) -> tuple[int, float, float]:
        """Draw a child of `node` and take its token out.

        Returns:
            The child, its probability among the tokens left, and the fraction of them left after
            it.
        """
        before, token = self.total, rng.categorical(self._mass)
        probability = min(1.0, float(self._mass[token]) / before)
        self._mass[token] = 0
        self.total = float(self._mass.sum(dtype=torch.float64))
        return tree.add(node, token, before), probability, self.total / before


@policy("dyspec", verifier="without_replacement")
class DySpec(TreePolicy):
    """DySpec with `nodes` draws, one at a time, each at the node of highest value.

    A node's value is the probability that all tokens above are accepted and all siblings before are
    not. `lowest` is the value of the latest draw; values never rise.
    """

    trees = "without_replacement"
    lowest = 1.0

    @checked
    def __init__(self, nodes: Positive = 64):
        self.nodes = nodes

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft a tree of up to `nodes` draws (Algorithm 1)."""
        tree = DraftTree.rooted(state.root, drafter.root.q)
        # (minus value, node, its rest; None: not expanded yet); a node is there once at most
        frontier: list[tuple[float, int, Rest | None]] = [(-1.0, 0, Rest(tree.q_at(0)))]
        while frontier and len(tree) <= self.nodes:
            negative, node, rest = heapq.heappop(frontier)
            if tree.depth[node] >= state.room:
                continue
            if rest is None:
                drafter.expand(tree, [node])
                rest = Rest(tree.q_at(node))
            self.lowest = -negative
            child, probability, left = rest.draw(tree, node, rng)
            heapq.heappush(frontier, (negative * probability, child, None))
            if not rest.empty:
                heapq.heappush(frontier, (negative * left, node, rest))
        return tree


@policy("dyspec_threshold", verifier="without_replacement")
class DySpecThreshold(TreePolicy):
    """DySpec level by level, with one draft pass each.

    It draws at every node of value at least `threshold`, up to `nodes` in all.
    """

    trees = "without_replacement"

    @checked
    def __init__(self, threshold: Proper = 1 / 64, nodes: Positive = 64):
        self.threshold, self.nodes = threshold, nodes

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft a tree level by level (Algorithm 2)."""
        tree = DraftTree.rooted(state.root, drafter.root.q)
        level = [(0, 1.0)]
        for depth in range(state.room):
            if depth and level:
                drafter.expand(tree, [node for node, _ in level])
            grown = []
            for node, value in level:
                rest = Rest(tree.q_at(node))
                while not rest.empty and value >= self.threshold and len(tree) <= self.nodes:
                    child, probability, left = rest.draw(tree, node, rng)
                    if value * probability >= self.threshold:
                        grown.append((child, value * probability))
                    value *= left
            level = grown
            if not level or len(tree) > self.nodes:
                break
        return tree
