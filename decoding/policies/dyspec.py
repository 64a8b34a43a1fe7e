"""DySpec: children drawn without replacement where a draw is most likely to be accepted (Algorithms 1 and 2, paper 004).

What decides whether to draw at a place is known before the token is: values are products of draft probabilities of tokens
drawn earlier. So the tree's law is what the without-replacement rule assumes.
"""

import heapq

from torch import Tensor

from decoding.drafter import Drafter
from decoding.policies.base import DecodingState
from decoding.policies.limits import require_positive, require_shares
from decoding.sampling import Coins
from decoding.tree import DraftTree


def draw_distinct(tree: DraftTree, node: int, rest: Tensor, coins: Coins) -> tuple[int, float, Tensor | None]:
    """Draw one more child of `node` from `rest` [V], the draft's mass of tokens not drawn there yet (unnormalised). Returns the
    child, its probability, and what is left of the mass (None: nothing)."""
    total = float(rest.sum())
    token = coins.draw(rest)
    probability = min(1.0, float(rest[token]) / total)
    left = rest.clone()
    left[token] = 0
    return tree.add(node, token), probability, left if float(left.sum()) > 0 else None


class DySpec:
    """One draw at a time, `nodes` in all, always at the place of highest value: the probability that all tokens above are
    accepted and all siblings before are not. `values` are those of the last draft, in order; they never rise."""

    trees = "distinct"

    def __init__(self, nodes: int = 64):
        require_positive(nodes=nodes)
        self.nodes = nodes
        self.values: list[float] = []

    def draft(self, state: DecodingState, drafter: Drafter, coins: Coins) -> DraftTree:
        tree, self.values = DraftTree.rooted(state.root, drafter.root.q), []
        places = [(-1.0, 0, 0, tree.q[0])]  # (minus value, order, node, mass left; None: not expanded yet)
        order = 0
        while places and len(tree) <= self.nodes:
            negative, _, node, rest = heapq.heappop(places)
            if tree.depth[node] >= state.room:
                continue
            if rest is None:
                drafter.expand(tree, [node])
                rest = tree.q[node]
            self.values.append(-negative)
            child, probability, left = draw_distinct(tree, node, rest, coins)
            heapq.heappush(places, (negative * probability, (order := order + 1), child, None))
            if left is not None:
                heapq.heappush(places, (negative * (1 - probability), (order := order + 1), node, left))
        return tree


class DySpecThreshold:
    """Level by level, one draft pass each: draws at every place of value at least `threshold`, up to `nodes` in all."""

    trees = "distinct"

    def __init__(self, threshold: float = 1 / 64, nodes: int = 64):
        require_positive(nodes=nodes)
        require_shares(threshold=threshold)
        self.threshold, self.nodes = threshold, nodes

    def draft(self, state: DecodingState, drafter: Drafter, coins: Coins) -> DraftTree:
        tree = DraftTree.rooted(state.root, drafter.root.q)
        level = [(0, 1.0)]
        for depth in range(state.room):
            if depth and level:
                drafter.expand(tree, [node for node, _ in level])
            grown = []
            for node, value in level:
                rest: Tensor | None = tree.q[node]
                while rest is not None and value >= self.threshold and len(tree) <= self.nodes:
                    child, probability, rest = draw_distinct(tree, node, rest, coins)
                    if value * probability >= self.threshold:
                        grown.append((child, value * probability))
                    value *= 1 - probability
            level = grown
            if not level or len(tree) > self.nodes:
                break
        return tree
