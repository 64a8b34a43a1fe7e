"""Labels of Traversal verification, over many nodes at once. `traversal.py` is the algorithm."""

import torch
from torch import Tensor

from nde_talf.decoding.rules.labels.branching import Level
from nde_talf.decoding.rules.residual import Residual, accept, ratio
from nde_talf.decoding.rules.sums import positive_sums


def traversal_gains(levels: list[Level], start: Tensor) -> Tensor:
    """Return cumulative gains [B, S, L + 1] in E[tau + 1] over the first 0..L levels.

    1 + sum over nodes u of visit(u) w(u) is unbiased, where w(u) is the weight u is reached with
    and visit(u) the probability that no earlier sibling on the way was accepted. What is below u
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


def _residuals(level: Level, w0: Tensor) -> Residual:
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
