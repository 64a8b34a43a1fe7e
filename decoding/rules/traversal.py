"""Traversal verification: bottom-up, the leaves first.

On a single path it is block verification (BV; Eq. 4 to 7, GBV paper).

The weight that a node is reached with is the probability that something in its subtree is accepted
once it is visited, whatever the subtree looks like. This is why merged prefixes stay lossless.
"""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.registry import DISTINCT, IID, PATHS, rule
from nde_talf.decoding.rules.batch import Nodes, RowTree, correction, or_target
from nde_talf.decoding.rules.sums import positive_sums
from nde_talf.decoding.rules.walk import Node, Residual, accept, excess, ratio, reject
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree, Verdict

if TYPE_CHECKING:
    from nde_talf.decoding.rules.labels import Level


class Weights(NamedTuple):
    """Weights of all nodes [N] of a tree, float64.

    Attributes:
        w0: the weight that a node is reached with.
        c: the residual's coefficient after all its children.
        keep: the probability that it is accepted after these were rejected.
    """

    w0: Tensor
    c: Tensor
    keep: Tensor


def weights_of(tree: RowTree) -> Weights:
    """Compute all weights, one draw at a time: none depends on what is accepted."""
    w0 = torch.ones_like(tree.tokens, dtype=torch.float64)
    c, z, d = torch.zeros_like(w0), torch.ones_like(w0), torch.ones_like(w0)
    for number in range(1, len(w0)):
        draw = slice(number, number + 1)
        above, real = tree.parents[draw].clamp(min=0), tree.parents[draw] >= 0
        node = Nodes(tree.p(above), tree.q(above), tree.tokens[draw, None], real)
        state, reached = Residual(c[above], z[above], d[above]), w0[above]
        weight = accept(node.px(0), node.qx(0), state, reached)
        w0[draw] = z[draw] = torch.where(real & (tree.first[draw] == number), weight, 0.0)
        after = reject(node, state, reached)
        for field, value, before in zip((c, z, d), after, state, strict=True):
            field[above] = torch.where(real, value, before)
    return Weights(w0, c, torch.where(w0 < 1, z / d, w0))


def traversal_rows(tree: RowTree, rng: Rng) -> Verdict:
    """Verify a tree on a device.

    The accepted node is the first that is kept in the order of the visits, children before parents.
    Its law over the nodes is one categorical draw.
    """
    weights = weights_of(tree)
    law = weights.keep * torch.where(tree.before(), 1 - weights.keep, 1.0).prod(-1)
    end = rng.categorical(law[None])
    w0, c, p = weights.w0[end], weights.c[end], tree.p(end)
    left = or_target(excess(p, tree.q(end), c, w0), p, c == 0)
    token = correction(left, torch.ones_like(end, dtype=torch.bool), rng)
    return Verdict(end, torch.where(law.isfinite().all(), token, -1))


def traversal_gains(levels: "list[Level]", start: Tensor) -> Tensor:
    """Return cumulative gains [B, S, L + 1] in E[tau + 1] over the first 0..L levels.

    1 + sum over nodes u of visit(u) w(u) is unbiased, where w(u) is the weight u is reached with
    and visit(u) the probability that no earlier sibling on the way was accepted. What lies below u
    is integrated out, so there is less noise than in E[tau + 1 | tree].

    start: [B], the weight of the node that the bundle hangs from.
    """
    member = levels[0].member
    w0 = start.double()[:, None, None].expand(-1, len(member), member.shape[1])
    visit = torch.ones_like(w0)
    totals = [torch.zeros_like(w0[..., 0])]
    for level in levels:
        weight = accept(level.px, level.qx, _residuals(level, w0), w0) * level.member
        visited = visit * level.none_before(weight)
        totals.append(totals[-1] + (visited * weight).sum(-1))
        # A path's node is entered through the first member draw of its token.
        first = (level.same_next & level.member[None, :, None, :]).to(torch.uint8).argmax(-1)
        w0, visit = weight.gather(-1, first), visited.gather(-1, first)
    return torch.stack(totals, -1)


def _residuals(level: "Level", w0: Tensor) -> Residual:
    """Return what is left of p [B, S, K] before each draw, at nodes reached with w0."""
    c, d = torch.zeros_like(w0), torch.ones_like(w0)
    node = level.node[:, None].expand_as(w0)
    for rejected in range(1, w0.shape[-1]):
        at = (level.earlier >= rejected) & level.member & (w0 > 0)
        if not bool(at.any()):
            break
        c[at] += d[at]
        # Many subsets arrive at a node with the same state.
        states = torch.stack([node[at].double(), w0[at], c[at]], -1)
        states, index = states.unique(dim=0, return_inverse=True)
        sums = positive_sums(level.p, level.q, states[:, 0].long(), states[:, 1], states[:, 2])
        d[at] = sums[index] + 1 - w0[at]
    return Residual(c, None, d)


def path_weights(px: Tensor, qx: Tensor) -> Tensor:
    """Return the weights [T, L + 1] of T single paths: w_i = min(1, w_{i-1} p / q) (Eq. 4).

    px, qx: [T, L] probabilities of their tokens.
    """
    weights = [torch.ones_like(px[:, 0])]
    for level in range(px.shape[1]):
        weights.append(ratio(weights[-1] * px[:, level], qx[:, level]))
    return torch.stack(weights, -1)


# Tree verification (Hu & Huang, 2024) draws the verdict of a path in one go, from the law that
# block verification has.
@rule("tv", PATHS, on_device=traversal_rows)
@rule("bv", PATHS, on_device=traversal_rows)
@rule("traversal", IID, on_device=traversal_rows, labels=traversal_gains)
def traversal(tree: DraftTree, rng: Rng, without_replacement: bool = False) -> Verdict:
    """Verify `tree`, whose children are i.i.d. draws, or drawn without replacement."""
    verdict = _visit(tree, 0, 1.0, rng, without_replacement)
    assert verdict is not None  # the root is accepted with probability 1
    return verdict


rule("traversal_without_replacement", DISTINCT, on_device=traversal_rows)(
    partial(traversal, without_replacement=True)
)


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
    return Verdict(number, node.draw(node.rest(kept.c, w0) if kept.c else node.p, rng, w0))


def _kept(node: Node, state: Residual, w0: float, left: float | None, rng: Rng) -> Residual | None:
    """Decide whether a node is accepted, after its children; returns what is left of p if it is.

    state: before the last child was rejected. left: the mass of q that this one was drawn from.
    """
    keep = w0
    if node.count and w0 < 1:
        # The final probability of acceptance is at most this one: most nodes are rejected here,
        # without a reduction.
        bound = state.z / state.d
        if not rng.bernoulli(bound):
            return None
        state = reject(node, state, w0, left)
        keep = state.z / state.d / bound
    elif node.count:
        # Something is always accepted at weight 1, also where rounding left z = 0.
        state = reject(node, state, w0, left, last=True)
    return state if rng.bernoulli(keep) else None
