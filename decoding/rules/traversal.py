"""Traversal verification: bottom-up, the leaves first.

On a single path it is block verification (BV; Eq. 4 to 7, GBV paper).

The weight that a node is reached with is the probability that something in its subtree is accepted
once it is visited, whatever the subtree looks like. This is why merged prefixes stay lossless.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from nde_talf.decoding.registry import DISTINCT, IID, PATHS
from nde_talf.decoding.rules.labels.traversal import traversal_gains
from nde_talf.decoding.rules.residual import Residual, accept, node_of, reject
from nde_talf.decoding.rules.verification_table import nodes_of
from nde_talf.decoding.rules.walk import rule
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree, Verdict


# Tree verification (Hu & Huang, 2024) draws the verdict of a path in one go, from the law that
# block verification has.
@rule("tv", PATHS, table=(None, True))
@rule("bv", PATHS, table=(None, True))
@rule("traversal", IID, labels=traversal_gains, table=(None, True))
@rule("traversal_without_replacement", DISTINCT, without_replacement=True)
def traversal(tree: DraftTree, rng: Rng, without_replacement: bool = False) -> Verdict:
    """Verify `tree`, whose children are i.i.d. draws, or drawn without replacement."""
    nodes = (
        partial(node_of, tree, without_replacement=True)
        if without_replacement
        else nodes_of(tree, rng, bottom_up=True)
    )
    visits = [_visit(tree, nodes, 0, 1.0, rng)]
    # A stack, as a path may be longer than Python recurses. The root ends it: its weight is 1.
    while not isinstance(found := next(visits[-1], None), Verdict):
        if found:
            visits.append(_visit(tree, nodes, *found, rng))
        else:
            visits.pop()
    return found


def _visit(
    tree: DraftTree, nodes: Any, number: int, w0: float, rng: Rng
) -> Iterator[tuple[int, float] | Verdict]:
    """Yield each child of node `number` to visit, with its weight; then the verdict, if it is here.

    w0: the weight that the node is reached with. Children are visited before their parent; a
    repeated draw only changes what is left of p.
    """
    children = tree.children[number]
    node = nodes(number)
    masses = node.left or [None] * len(children)
    state, left = Residual(0.0, w0), None
    for draw, (child, mass) in enumerate(zip(children, masses, strict=True)):
        if draw:
            state = reject(node, state, w0, left)
        left = mass
        if child in children[:draw]:
            continue
        weight = accept(node.px(draw), node.qx(draw), state, w0, left)
        if weight > 0:  # at 0 it would be rejected with certainty, and everything below it
            yield child, weight
    # Something is always accepted at weight 1, also where rounding left z = 0. Otherwise the final
    # probability is at most this one: most nodes are rejected here, without a reduction.
    bound = state.z / state.d if w0 < 1 else 1.0
    if not rng.bernoulli(bound):
        return
    if children:
        state = reject(node, state, w0, left)
        if w0 < 1 and not rng.bernoulli(state.z / state.d / bound):
            return
    yield Verdict(number, node.draw(node.rest(state.c, w0), rng, w0))
