"""Traversal verification: bottom-up, the leaves first.

On a single path it is block verification (BV; Eq. 4 to 7, GBV paper).

The weight that a node is reached with is the probability that something in its subtree is accepted
once it is visited, whatever the subtree looks like. This is why merged prefixes stay lossless.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.device import number
from nde_talf.decoding.rules.bundles import Level, none_before
from nde_talf.decoding.rules.reduce import Scratch, positive_sums, total
from nde_talf.decoding.rules.rules import (
    EMPTY,
    Node,
    Nodes,
    Residual,
    Scaled,
    accept,
    excess,
    ratio,
    reject,
    scaled,
)
from nde_talf.decoding.rules.trees import Trees
from nde_talf.decoding.rules.walk import correction, or_target
from nde_talf.decoding.sampling import Rng, unnormalised
from nde_talf.decoding.tree import DraftTree, Verdict, WarpedRows

_PATH, _REST = Scratch(), Scratch()  # p of a path; what is left of p at a node


def traversal(tree: DraftTree, rng: Rng, without_replacement: bool = False) -> Verdict:
    """Verify `tree` by visiting children before their parent; a repeated draw only changes what is
    left of p.
    """
    if not without_replacement and tree.depth[-1] == sum(map(len, tree.children)):
        return block(*_along(tree), tree.q[:-1], tree.tokens[1:], rng)
    verdict = _visit(tree, 0, 1.0, rng, without_replacement)
    assert verdict is not None  # the root is accepted with probability 1
    return verdict


def _visit(
    tree: DraftTree, number: int, w0: float, rng: Rng, without_replacement: bool
) -> Verdict | None:
    """What is accepted of node `number`, reached with the weight w0, and of what is below it; None
    if nothing is.
    """
    children, masses = tree.children[number], tree.masses(number) if without_replacement else None
    node = Node(
        tree.p_at(number), tree.q[number], [tree.tokens[child] for child in children], masses
    )
    seen: set[int] = set()
    state, keep = Residual(0.0, w0, 1.0), w0
    for draw, child in enumerate(children):
        left, last = node.left[draw] if node.left else None, draw == len(children) - 1
        if child not in seen:
            seen.add(child)
            weight = accept(node.px(draw), node.qx(draw), state, w0, left)
            # A child of weight 0 would be rejected with certainty, and everything below it.
            verdict = _visit(tree, child, weight, rng, without_replacement) if weight > 0 else None
            if verdict is not None:
                return verdict
        bound = None
        if w0 < 1 and last:
            # The final probability of acceptance is at most this one: most nodes are rejected here,
            # without a reduction.
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


def block(
    px: Iterable[float],
    p: Callable[[int], Scaled],
    q: Sequence[Any],
    tokens: Sequence[int],
    rng: Rng,
) -> Verdict:
    """Block verification of a path of `tokens` [n] below the root: the same as visiting its nodes
    (Eq. 4 to 7, GBV paper).

    1. The weight of node i is w_i = min(1, w_{i-1} p(x_i) / q(x_i)).
    2. From the last node up, node i is accepted with z / (z + 1 - w_i), where z = sum_t (w_i p(t) -
       q(t))_+; the last one with w_i. Neither exceeds w_i, so w_i is tried first: most nodes are
       rejected without a look at z.
    3. The token after the accepted node is drawn from (w_i p - q)_+, after the last one from p.

    Args:
        px: [n] p of the tokens, looked at up to the first of weight 0.
        p: gives at node 0 to n a row [V] and what it has to be divided by.
        q: [n] the laws of the tokens: rows [V], or what gives one token's probability and the row
            by `dense()`.
    """
    weights = [
        1.0
    ]  # of the root, where something is always accepted (also where rounding left z = 0)
    for above, law, token in zip(px, q, tokens, strict=False):
        weight = ratio(weights[-1] * above, number(law, token))
        if not weight > 0:  # rejected with certainty, and everything after it
            break
        weights.append(weight)
    for end in reversed(range(len(weights))):
        w0 = weights[end]
        if (w0 < 1 or end == len(q)) and not rng.bernoulli(w0):
            continue
        row, scale = p(end)
        if end == len(q):
            return Verdict(end, rng.categorical(row))
        law = q[end] if isinstance(q[end], Tensor) else q[end].dense()
        spare = _REST.rows(1, row)[0] if row.is_cpu else None
        left = torch.sub(row, law, alpha=min(1 / w0, 1e37) * scale, out=spare).clamp_(min=0)
        mass = w0 * total(left)
        z = mass / scale
        if rng.bernoulli(z / (z + 1 - w0) / w0 if w0 < 1 else 1.0):
            return Verdict(end, rng.categorical(left if mass > EMPTY else row))
    raise AssertionError("the root is accepted with probability 1")


def _along(tree: DraftTree) -> tuple[Iterable[float], Callable[[int], Scaled]]:
    """Px and p of a path, as `block` takes them."""
    p, tokens = tree.p, tree.tokens[1:]
    if isinstance(p, WarpedRows) and (dense := p.dense()) is not None and dense.is_cpu:
        px = [float(row[token]) for row, token in zip(dense.numpy(), tokens, strict=False)]
        return px, lambda node: (dense[node], 1.0)
    if not isinstance(p, WarpedRows) or not p.positive:
        rows = list(map(tree.p_at, range(len(tree))))
        return map(number, rows, tokens), lambda node: scaled(rows[node])
    # No weight will be 0, so that all rows before tokens are looked at.
    logits = p.logits[:-1]
    probs, totals = unnormalised(logits, p.setting, _PATH.rows(len(tokens), logits))
    divisors = [1.0] * len(tokens) if totals is None else totals[:, 0].tolist()
    px = [
        float(row[token]) / divisor
        for row, token, divisor in zip(probs.numpy(), tokens, divisors, strict=True)
    ]
    return (
        px,
        lambda node: (probs[node], divisors[node]) if node < len(tokens) else scaled(p.row(node)),
    )


@dataclass
class Weights:
    """Of all nodes [B, N], float64. w0: the weight that a node is reached with; c: of what is left
    of p after all its children; keep: the probability that it is accepted after these were
    rejected.
    """

    w0: Tensor
    c: Tensor
    keep: Tensor


def weights_of(trees: Trees) -> Weights:
    """No node's weight depends on what is accepted: they are computed one draw of every tree at a
    time.
    """
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

    A node's weight does not depend on earlier decisions, so the weights of all nodes come first.
    The accepted node is the first that is kept in the order of the visits, children before parents.
    Its law over the nodes is one categorical draw.
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
    """Cumulative gain [B, S, L + 1] in E[tau + 1] over the first 0..L levels: 1 + sum over nodes u
    of visit(u) w(u) is unbiased, where w(u) is the weight u is reached with and visit(u) the
    probability that no earlier sibling on the way was accepted.

    What lies below u is integrated out, so there is less noise than in E[tau + 1 | tree].

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
            states, index = torch.stack([node[at].double(), w0[at], c[at]], -1).unique(
                dim=0, return_inverse=True
            )
            d[at] = (
                positive_sums(level.p, level.q, states[:, 0].long(), states[:, 1], states[:, 2])[
                    index
                ]
                + 1
                - w0[at]
            )
        weight = accept(level.px, level.qx, Residual(c, None, d), w0) * level.member
        visited = visit * none_before(weight, level.siblings)
        totals.append(totals[-1] + (visited * weight).sum(-1))
        # A path's node is entered through the first member draw of its token.
        first = (level.same_next & level.member[None, :, None, :]).to(torch.uint8).argmax(-1)
        w0, visit = weight.gather(-1, first), visited.gather(-1, first)
    return torch.stack(totals, -1)


def path_weights(px: Tensor, qx: Tensor) -> Tensor:
    """Weights [T, L + 1] of T single paths with probabilities px, qx [T, L]: w_i = min(1, w_{i-1} p
    / q) (Eq. 4, GBV paper).
    """
    weights = [torch.ones_like(px[:, 0])]
    for level in range(px.shape[1]):
        weights.append(ratio(weights[-1] * px[:, level], qx[:, level]))
    return torch.stack(weights, -1)
