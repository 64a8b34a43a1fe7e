"""Traversal verification: bottom-up, the leaves first.

On a single path it is block verification (BV; Eq. 4 to 7, GBV paper).

The weight that a node is reached with is the probability that something in its subtree is accepted
once it is visited, whatever the subtree looks like. This is why merged prefixes stay lossless.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from nde_talf.decoding.registry import DISTINCT, IID, PATHS, rule
from nde_talf.decoding.rules.residual import Node, Residual, accept, reject
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree, Verdict

if TYPE_CHECKING:
    from nde_talf.decoding.rules.labels import Level


def _gains(levels: "list[Level]", start: Tensor) -> Tensor:
    from nde_talf.decoding.rules.traversal_labels import traversal_gains

    return traversal_gains(levels, start)


# Tree verification (Hu & Huang, 2024) draws the verdict of a path in one go, from the law that
# block verification has.
@rule("tv", PATHS)
@rule("bv", PATHS)
@rule("traversal", IID, labels=_gains)
@rule("traversal_without_replacement", DISTINCT, without_replacement=True)
def traversal(tree: DraftTree, rng: Rng, without_replacement: bool = False) -> Verdict:
    """Verify `tree`, whose children are i.i.d. draws, or drawn without replacement."""
    verdict = _visit(tree, 0, 1.0, rng, without_replacement)
    assert verdict is not None  # the root is accepted with probability 1
    return verdict


def _visit(
    tree: DraftTree, number: int, w0: float, rng: Rng, without_replacement: bool
) -> Verdict | None:
    """Return what is accepted of node `number` and of what is below it; None if nothing is.

    w0: the weight that the node is reached with. Children are visited before their parent; a
    repeated draw only changes what is left of p.
    """
    children, masses = tree.children[number], tree.masses(number) if without_replacement else None
    drafted = [tree.tokens[child] for child in children]
    node = Node(tree.p[number], tree.q[number], drafted, masses)
    state, left = Residual(0.0, w0), None
    for draw, child in enumerate(children):
        if draw:
            state = reject(node, state, w0, left)
        left = masses[draw] if masses else None
        if child in children[:draw]:
            continue
        weight = accept(node.px(draw), node.qx(draw), state, w0, left)
        # A child of weight 0 would be rejected with certainty, and everything below it.
        verdict = _visit(tree, child, weight, rng, without_replacement) if weight > 0 else None
        if verdict is not None:
            return verdict
    kept = _kept(node, state, w0, left, rng)
    if kept is None:
        return None
    return Verdict(number, node.draw(node.rest(kept.c, w0), rng, w0))


def _kept(node: Node, state: Residual, w0: float, left: float | None, rng: Rng) -> Residual | None:
    """Decide whether a node is accepted, after its children; returns what is left of p if it is.

    state: before the last child was rejected. left: the mass of q that this one was drawn from.
    """
    # Something is always accepted at weight 1, also where rounding left z = 0. Otherwise the final
    # probability is at most this one: most nodes are rejected here, without a reduction.
    bound = state.z / state.d if w0 < 1 else 1.0
    if not rng.bernoulli(bound):
        return None
    if node.count:
        state = reject(node, state, w0, left)
        if w0 < 1 and not rng.bernoulli(state.z / state.d / bound):
            return None
    return state
