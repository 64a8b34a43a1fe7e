"""Traversal verification: bottom-up, the leaves first. On a single path it is block verification (BV; Eq. 4 to 7, GBV paper).

The weight that a node is reached with is the probability that something in its subtree is accepted once it is visited,
whatever the subtree looks like. This is why merged prefixes stay lossless.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level, none_before
from decoding.verification.reduce import positive_sums, total
from decoding.verification.rules import EMPTY, Node, Nodes, Residual, accept, excess, ratio, reject
from decoding.verification.trees import Trees
from decoding.verification.walk import correction, or_target

At = Callable[[int], tuple[Node, list[int]]]
"""A node's number -> the node, and the numbers of its draws' nodes, with repeats."""


def traversal(tree: DraftTree, rng: Rng, without_replacement: bool = False) -> Verdict:
    """Verify `tree` by visiting children before their parent; a repeated draw only changes what is left of p."""

    def at(number: int) -> tuple[Node, list[int]]:
        children = tree.children[number]
        left = tree.masses(number) if without_replacement else None
        return Node(tree.p_at(number), tree.q[number], [tree.tokens[child] for child in children], left), children

    return bottom_up(at, rng)


def bottom_up(at: At, rng: Rng) -> Verdict:
    """Visit node 0 and what is below it."""
    verdict = _visit(at, 0, 1.0, rng)
    assert verdict is not None  # the root is accepted with probability 1
    return verdict


def _visit(at: At, number: int, w0: float, rng: Rng) -> Verdict | None:
    """What is accepted of node `number`, reached with the weight w0, and of what is below it; None if nothing is."""
    node, children = at(number)
    seen: set[int] = set()
    state, keep = Residual(0.0, w0, 1.0), w0
    for draw, child in enumerate(children):
        left, last = node.left[draw] if node.left else None, draw == len(children) - 1
        if child not in seen:
            seen.add(child)
            weight = accept(node.px(draw), node.qx(draw), state, w0, left)
            # A child of weight 0 would be rejected with certainty, and everything below it.
            verdict = _visit(at, child, weight, rng) if weight > 0 else None
            if verdict is not None:
                return verdict
        bound = None
        if w0 < 1 and last:
            # The final probability of acceptance is at most this one: most nodes are rejected here, without a reduction.
            bound = state.z / state.d
            if not rng.bernoulli(bound):
                return None
        state = reject(node, state, w0, left, last and w0 == 1)
        if bound is not None:
            keep = state.z / state.d / bound
    # At the root w0 = 1 and something is always accepted (also where rounding left z = 0).
    if not rng.bernoulli(keep):
        return None
    weights = node.rest(state.c, w0) if state.c else node.p
    empty = state.c and w0 * total(weights) <= EMPTY
    return Verdict(number, rng.categorical(node.p if empty else weights))


@dataclass
class Weights:
    """Of all nodes [B, N], float64. w0: the weight that a node is reached with; c: of what is left of p after all its children;
    keep: the probability that it is accepted after these were rejected."""

    w0: Tensor
    c: Tensor
    keep: Tensor


def weights_of(trees: Trees) -> Weights:
    """No node's weight depends on what is accepted: they are computed one draw of every tree at a time."""
    first, count = trees.first(), trees.tokens.shape[1]
    w0 = torch.ones_like(trees.tokens, dtype=torch.float64)
    c, z, d = torch.zeros_like(w0), torch.ones_like(w0), torch.ones_like(w0)
    every = torch.arange(len(w0), device=w0.device)
    for draw in range(1, count):
        above, real = trees.parents[:, draw].clamp(min=0), trees.parents[:, draw] >= 0
        node = Nodes(trees.p(above), trees.q(above), trees.tokens[:, draw, None], real)
        state, own = Residual(c[every, above], z[every, above], d[every, above]), w0[every, above]
        left = None if trees.left is None else trees.left[:, draw]
        weight = accept(node.px(0), node.qx(0), state, own, left)
        w0[:, draw] = z[:, draw] = torch.where(real & (first[:, draw] == draw), weight, 0.0)
        after = reject(node, state, own, left)
        for field, value, before in zip((c, z, d), after, state, strict=True):
            field[every, above] = torch.where(real, value, before)
    return Weights(w0, c, torch.where(w0 < 1, z / d, w0))


def traversal_trees(trees: Trees, rng: Rng) -> Verdict:
    """The same for B trees on a device.

    A node's weight does not depend on earlier decisions, so the weights of all nodes come first. The accepted node is the first
    that is kept in the order of the visits, children before parents. Its law over the nodes is one categorical draw.
    """
    weights = weights_of(trees)
    law = weights.keep * torch.where(trees.before(), 1 - weights.keep[:, None, :], 1.0).prod(-1)
    end = rng.categorical(law)
    w0, c = (x.gather(1, end[:, None])[:, 0] for x in (weights.w0, weights.c))
    p = trees.p(end)
    left = or_target(excess(p, trees.q(end), c, w0), p, c == 0)
    token = correction(left, torch.ones_like(end, dtype=torch.bool), rng)
    return Verdict(end, torch.where(law.isfinite().all(-1), token, -1))


def traversal_gains(levels: list[Level], start: Tensor) -> Tensor:
    """Cumulative gain [B, S, L + 1] in E[tau + 1] over the first 0..L levels: 1 + sum over nodes u of visit(u) w(u) is
    unbiased, where w(u) is the weight u is reached with and visit(u) the probability that no earlier sibling on the way was
    accepted. What lies below u is integrated out, so there is less noise than in E[tau + 1 | tree].

    `start` [B] is the weight of the node that the bundle hangs from. K = 1 is block verification.
    """
    member = levels[0].member
    w0 = start.double()[:, None, None].expand(-1, len(member), member.shape[1])
    visit = torch.ones_like(w0)
    totals = [torch.zeros_like(w0[..., 0])]
    for level in levels:
        earlier = level.earlier
        c, d = torch.zeros_like(w0), torch.ones_like(w0)
        node = level.node[:, None].expand_as(earlier)
        for rejected in range(1, member.shape[1]):
            at = (earlier >= rejected) & level.member & (w0 > 0)
            if not bool(at.any()):
                break
            c[at] += d[at]
            # Many subsets arrive at a node with the same state.
            states, index = torch.stack([node[at].double(), w0[at], c[at]], -1).unique(dim=0, return_inverse=True)
            d[at] = positive_sums(level.p, level.q, states[:, 0].long(), states[:, 1], states[:, 2])[index] + 1 - w0[at]
        weight = accept(level.px, level.qx, Residual(c, None, d), w0) * level.member
        visited = visit * none_before(weight, level.siblings)
        totals.append(totals[-1] + (visited * weight).sum(-1))
        # A path's node is entered through the first member draw of its token.
        first = (level.same_next & level.member[None, :, None, :]).to(torch.uint8).argmax(-1)
        w0, visit = weight.gather(-1, first), visited.gather(-1, first)
    return torch.stack(totals, -1)


def path_weights(px: Tensor, qx: Tensor) -> Tensor:
    """Weights [T, L + 1] of T single paths with probabilities px, qx [T, L]: w_i = min(1, w_{i-1} p / q) (Eq. 4, GBV paper)."""
    weights = [torch.ones_like(px[:, 0])]
    for level in range(px.shape[1]):
        weights.append(ratio(weights[-1] * px[:, level], qx[:, level]))
    return torch.stack(weights, -1)
