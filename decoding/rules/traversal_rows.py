"""Traversal verification over many nodes at once: on a device, and for its labels.

`traversal.py` is the algorithm.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.rules.batch import Nodes, RowTree, correction, or_target
from nde_talf.decoding.rules.residual import Residual, accept, excess, ratio, reject
from nde_talf.decoding.rules.sums import positive_sums
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import Verdict

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
        node = Nodes(tree.p[above], tree.q_at(above), tree.tokens[draw, None], real)
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
    w0, c, p = weights.w0[end], weights.c[end], tree.p[end]
    left = or_target(excess(p, tree.q_at(end), c, w0), p, c == 0)
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
