"""Traversal verification: bottom-up in depth-first order, the leaf first. On a single path it is block verification.

The weight a node arrives with is the probability that something in its subtree is accepted once it is visited,
whatever the subtree looks like; this is why merged prefixes stay lossless.
"""

from itertools import repeat

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level, none_before, ratio
from decoding.verification.residual import Residual, positive_sums


def traversal(tree: DraftTree, rng: Rng, distinct: bool = False) -> Verdict:
    """Verify `tree` by visiting children before their parent; a repeated draw only updates the residual.

    distinct: the children were drawn without replacement.
    """

    def visit(node: int, w0: float) -> Verdict | None:
        residual, children = Residual(tree.p[node], tree.q[node], w0), tree.children[node]
        masses = tree.masses(node) if distinct else repeat(1.0)
        seen, keep = set(), w0
        for index, (child, left) in enumerate(zip(children, masses, strict=False), start=1):
            if child not in seen:
                seen.add(child)
                weight = residual.weight(tree.tokens[child], left)
                # A child of weight 0 would be rejected with certainty, and everything below it.
                verdict = visit(child, weight) if weight > 0 else None
                if verdict is not None:
                    return Verdict([child, *verdict.path], verdict.token)
            if w0 < 1 and index == len(children):
                # What is kept in the end is at most what would be kept now: most nodes fall here, without a reduction.
                if not rng.bernoulli(bound := residual.z / residual.d):
                    return None
                residual.reject(left)
                keep = residual.z / residual.d / bound
            else:
                residual.reject(left)
        # At the root w0 = 1 and something is always accepted (also where rounding left z = 0).
        return Verdict([], rng.categorical(residual.target())) if rng.bernoulli(keep) else None

    return visit(0, 1.0)


def traversal_without_replacement(tree: DraftTree, rng: Rng) -> Verdict:
    """Traversal of trees whose children are distinct draws, as DySpec and Sequoia make them."""
    return traversal(tree, rng, distinct=True)


def traversal_gains(levels: list[Level], start: Tensor) -> Tensor:
    """Cumulative gain [B, S, L + 1] in E[tau + 1] over the first 0..L levels: 1 + sum over nodes u of visit(u) w(u) is
    unbiased, where w(u) is the weight u arrives with and visit(u) the probability that no earlier sibling on the way was
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
        weight = ratio(w0 * level.px - c * level.qx, d * level.qx) * level.member
        visited = visit * none_before(weight, level.siblings)
        totals.append(totals[-1] + (visited * weight).sum(-1))
        # A path's node is entered through the first member draw of its token.
        first = (level.same_next & level.member[None, :, None, :]).to(torch.uint8).argmax(-1)
        w0, visit = weight.gather(-1, first), visited.gather(-1, first)
    return torch.stack(totals, -1)
