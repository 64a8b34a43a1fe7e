"""Trees of a fixed shape.

The shape is a depth and branching (the DynaTree paper's baseline), or Sequoia's best shape for
measured acceptance rates.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.beam import top_tokens
from nde_talf.decoding.policies.dyspec import Rest
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree

Shape = tuple["Shape", ...]  # the shapes of a node's children, in draft order
Kind = Literal["top_k", "iid", "without_replacement"]


@checked
def fixed_shape(depth: Positive, branching: Positive, nodes: Positive) -> Shape:
    """`branching` children at every node down to `depth`, breadth first, up to `nodes` of them."""
    levels = [1]  # how many nodes each has
    while len(levels) <= depth and nodes:
        levels.append(min(levels[-1] * branching, nodes))
        nodes -= levels[-1]
    shapes: list[Shape] = [()] * levels[-1]
    for count in levels[-2::-1]:
        shapes = [tuple(shapes[at * branching : (at + 1) * branching]) for at in range(count)]
    return shapes[0]


@checked
def sequoia_shape(
    rates: Annotated[Sequence[float], Field(min_length=1)], nodes: Positive, depth: Positive
) -> Shape:
    """Find the shape with the most expected accepted tokens (Sequoia's dynamic programme).

    It has at most `nodes` drafted tokens. The i-th child of an accepted node is accepted with
    probability rates[i].

    `best[c][b]` is the expected number of accepted tokens among b nodes, which are the children c,
    c + 1, ... of an accepted node and what is below these, in so many levels. If child c and its
    subtree take `size` of the b nodes, then

        best[c][b] = max over size of  rates[c] (1 + below[size - 1]) + best[c + 1][b - size],

    where `below` is best[0] with one level less. 768 nodes and 16 rates take about a second.
    """
    below, choices = np.zeros(nodes + 1), list[list[np.ndarray]]()  # by level from the leaves
    for _ in range(min(depth, nodes)):
        best, sizes_by_child = np.zeros(nodes + 1), list[np.ndarray]()
        for rate in rates[:nodes][::-1]:
            rest, best, sizes = best, np.zeros(nodes + 1), np.zeros(nodes + 1, int)
            for b in range(1, nodes + 1):
                values = rate * (1 + below[:b]) + rest[b - 1 :: -1]
                if (largest := values.max()) > 1e-12:
                    best[b], sizes[b] = largest, 1 + (values >= largest - 1e-12).argmax()
            sizes_by_child.insert(0, sizes)
        choices.append(sizes_by_child)
        if (best == below).all():
            break
        below = best

    def shape(left: int, level: int) -> Shape:
        children: list[Shape] = []
        for sizes in choices[level] if level >= 0 else ():
            if not (taken := int(sizes[left])):
                break
            children.append(shape(taken - 1, level - 1))
            left -= taken
        return tuple(children)

    return shape(nodes, len(choices) - 1)


class Shaped(TreePolicy):
    """Tree of one fixed shape at every step.

    children: "top_k" (the most probable tokens), "iid" (drawn, repeats allowed) or
    "without_replacement" (drawn, each token once), which decides the verifiers allowed. I.i.d.
    draws that coincide are one node.
    """

    @checked
    def __init__(self, shape: Any, children: Kind = "without_replacement"):
        self.shape, self.trees = shape, children

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft the shape, as deep as the context has room."""
        tree = DraftTree.rooted(state.root, drafter.root.q)
        level = {0: self.shape}  # node -> the shapes of its children
        for depth in range(state.room):
            level = {node: shapes for node, shapes in level.items() if shapes}
            if not level:
                break
            if depth:
                drafter.expand(tree, list(level))
            drawn = self._drawn(tree, {node: len(shapes) for node, shapes in level.items()}, rng)
            grown: dict[int, Shape] = {}
            for shapes, nodes in zip(level.values(), drawn, strict=True):
                for child, shape in zip(nodes, shapes, strict=False):
                    grown[child] = (*grown.get(child, ()), *shape)
            level = grown
        return tree

    def _drawn(self, tree: DraftTree, counts: dict[int, int], rng: Rng) -> list[list[int]]:
        """Add up to `counts` children to each node; returns them, with repeats."""
        if self.trees == "without_replacement":
            return [_drawn_once(tree, node, count, rng) for node, count in counts.items()]
        if self.trees == "top_k":
            top = top_tokens(tree, list(counts), max(counts.values()))
            lines = zip(top, counts.values(), strict=True)
            drawn = [[token for value, token in line[:count] if value > 0] for line, count in lines]
        else:
            at = [row for row, count in enumerate(counts.values()) for _ in range(count)]
            tokens = iter(rng.categorical(tree.q_rows(list(counts)), at))
            drawn = [list(islice(tokens, count)) for count in counts.values()]
        return [
            [tree.add(node, token) for token in drawn_here]
            for node, drawn_here in zip(counts, drawn, strict=True)
        ]


def _drawn_once(tree: DraftTree, node: int, count: int, rng: Rng) -> list[int]:
    """Draw up to `count` different children of a node."""
    rest, children = Rest(tree.q_at(node)), list[int]()
    while not rest.empty and len(children) < count:
        children.append(rest.draw(tree, node, rng)[0])
    return children


@policy("fixed", verifier="without_replacement")
def fixed(
    depth: int = 4, branching: int = 2, nodes: int = 16, children: Kind = "without_replacement"
) -> Shaped:
    """Draft the first `nodes` of a full tree of `branching` children a node."""
    return Shaped(fixed_shape(depth, branching, nodes), children)


@policy("sequoia", verifier="without_replacement")
def sequoia(
    rates: tuple[float, ...] = (0.7, 0.12, 0.05, 0.02), nodes: int = 16, depth: int = 8
) -> Shaped:
    """Draft Sequoia's tree for these acceptance rates of a node's first, second, ... child."""
    return Shaped(sequoia_shape(rates, nodes, depth), "without_replacement")
