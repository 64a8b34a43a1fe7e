"""GBV, greedy multi-path block verification: select the branch of highest rank, then verify it as
one block.

At every node tokens are ranked by p / q (ties by id) and branches are compared at the first
position where they differ. The selected branch has a draft law of its own, q~, that favours large p
/ q; block verification with q~ in place of q is lossless (Eq. 25 to 29, GBV paper).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.device import number
from nde_talf.decoding.rules.bundles import Level, joined
from nde_talf.decoding.rules.ranking import (
    advantage,
    bracket,
    bracket_of,
    mass_below,
    mass_outside,
    order_by,
    place,
    rank_key,
)
from nde_talf.decoding.rules.reduce import in_place, row_chunks
from nde_talf.decoding.rules.rules import ratio, scaled, where
from nde_talf.decoding.rules.traversal import block, traversal_trees
from nde_talf.decoding.rules.trees import Trees
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree, Verdict


def power_sum(g: Any, f: Any, k: Any, max_k: int | None = None) -> Any:
    """h_k(g, f) = sum_{j<k} g^j f^{k-1-j} = (g^k - f^k) / (g - f), without the cancellation. k: a
    number, or a tensor of numbers up to `max_k`.
    """
    total = power = 1.0
    for j in range(1, k if max_k is None else max_k):
        power = power * g if j > 1 else g
        longer = (total * f if j > 1 else f) + power
        total = longer if max_k is None else where(j < k, longer, total)
    return total


def tilt(q: Any, g: Any, f: Any, lower: Any, k: Any, max_k: int | None = None) -> Any:
    """q~ of a token (Eq. 27, GBV paper).

    Args:
        q: the token's draft probability.
        g: the fraction of branches that rank as high as the token or lower.
        f: the fraction that rank lower.
        lower: f / g at the token before, 0 at the branch point.
        k: the number of branches.
    """
    return q * (power_sum(g, f, k, max_k) / power_sum(1.0, lower, k, max_k))


class TiltedRow:
    """q~ at one node of the selected branch, of `k` branches; `lower` = F / G, the fraction of
    lower-ranked branches so far.

    One token costs a masked sum. The full row costs a sort, and only a rejection needs it. exact:
    see `gbv`.
    """

    def __init__(self, p: Tensor, q: Tensor, k: int, lower: float, exact: bool = False):
        self.q, self.k, self.lower, self.exact = q, k, lower, exact
        self.score = advantage(p, q)
        self._spans: dict[int, tuple[float, float]] = {}
        self._dense: Tensor | None = None

    def place(self, token: int) -> float:
        """What `token` is ranked by; ties go to the larger id."""
        return bracket_of(float(self.score[token]), self.exact)[0]

    def span(self, token: int) -> tuple[float, float]:
        """(g, f) at `token`: fractions of branches ranked up to and with it, and strictly below."""
        if token not in self._spans:
            below = min(mass_below(self.score, self.q, token, self.exact), 1.0)
            upto = min(below + float(self.q[token]), 1.0)
            self._spans[token] = (
                self.lower + (1 - self.lower) * upto,
                self.lower + (1 - self.lower) * below,
            )
        return self._spans[token]

    def __getitem__(self, token: int) -> float:
        return tilt(float(self.q[token]), *self.span(token), self.lower, self.k)

    def dense(self) -> Tensor:
        if self._dense is None:
            order = order_by(self.score, self.exact)
            ranked = self.q.index_select(0, order)
            g = ranked.cumsum(0).clamp_(max=1)  # added up in float64 on a CPU
            if self.lower:
                g.mul_(1 - self.lower).add_(self.lower)
            f = torch.sub(g, ranked, alpha=1 - self.lower).clamp_(min=0)
            ranked = tilt(ranked, g, f, self.lower, self.k)
            self._dense = torch.empty_like(ranked).scatter_(0, order, ranked)
        return self._dense


def gbv(tree: DraftTree, rng: Rng, exact: bool = False) -> Verdict:
    """Block verification of the selected branch of a delayed tree. exact: tokens are ranked by the
    full float32 of p / q, as in the paper, and not by its upper half.
    """
    nodes, rows, k, lower = [0], list[Any](), 1, 0.0
    while children := tree.children[nodes[-1]]:
        q = tree.q_at(nodes[-1])
        chosen, k = children[0], max(k, len(children))  # 1 on the trunk, K from the branch point on
        row: Any = q
        if k > 1:
            row = TiltedRow(tree.p[nodes[-1]], q, k, lower, exact)
            chosen = max(
                children, key=lambda child: (row.place(tree.tokens[child]), tree.tokens[child])
            )
            upto, below = row.span(tree.tokens[chosen])
            lower = below / upto if upto > 0 else 0.0
        rows.append(row)
        nodes.append(chosen)
    p, tokens = list(map(tree.p_at, nodes)), [tree.tokens[node] for node in nodes[1:]]
    end, token = block(map(number, p, tokens), lambda at: scaled(p[at]), rows, tokens, rng)
    return Verdict(nodes[end], token)


def gbv_trees(trees: Trees, rng: Rng, exact: bool = False) -> Verdict:
    """The same for B trees on a device: the selected branches are paths, which are verified with q~
    in place of q.
    """
    node, every = (
        torch.zeros_like(trees.tokens[:, 0]),
        torch.arange(len(trees.tokens), device=trees.tokens.device),
    )
    lower, k = (
        torch.zeros(len(node), 1, dtype=torch.float64, device=node.device),
        torch.ones_like(node),
    )
    nodes, tokens, parents, rows = [node], [trees.tokens[:, 0]], [torch.full_like(node, -1)], []
    for level in range(trees.depth):
        draws, count, _ = trees.children(node)
        k = torch.maximum(k, count)
        q = trees.q(node)
        key = rank_key(advantage(trees.p(node), q), exact)
        rank = torch.where(
            torch.arange(draws.shape[1], device=draws.device) < count[:, None],
            place(key, draws),
            -1,
        )
        token = draws.gather(1, rank.argmax(1, keepdim=True))
        row, after = tilted_rows(q, key, k[:, None], trees.max_draws, lower, token)
        lower = torch.where(
            k[:, None] > 1, after, lower
        )  # on the trunk all branches are still level
        child = (
            ((trees.parents == node[:, None]) & (trees.tokens == token)).to(torch.uint8).argmax(1)
        )
        alive = (count > 0) & (parents[-1] >= -1)
        parents.append(torch.where(alive, level, -2))
        node = torch.where(alive, child, node)
        nodes.append(node)
        tokens.append(token[:, 0])
        rows.append(row)
    selected, tilted = torch.stack(nodes, 1), torch.stack(rows) if rows else None

    def p(at: Tensor) -> Tensor:
        return trees.p(selected[every, at])

    def q_tilted(at: Tensor) -> Tensor:
        return (
            trees.q(selected[every, at])
            if tilted is None
            else tilted[at.clamp(max=len(tilted) - 1), every]
        )

    path = Trees(torch.stack(tokens, 1), torch.stack(parents, 1), p, q_tilted, trees.depth, 1)
    end, last = traversal_trees(path, rng)
    return Verdict(selected[every, end], last)


def tilted_rows(
    q: Tensor, key: Tensor, k: Tensor, most: int, lower: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """q~ [B, V] of k [B, 1] branches, and what `lower` [B, 1] is after `token` [B, 1]; see
    `TiltedRow`.
    """
    order = key.argsort(dim=-1, stable=True)
    ranked = q.gather(-1, order).double()
    g = lower + (1 - lower) * ranked.cumsum(-1).clamp_(max=1)
    f = (g - (1 - lower) * ranked).clamp_(min=0)
    at = (order == token).to(torch.uint8).argmax(-1, keepdim=True)
    upto, below = (x.gather(-1, at) for x in (g, f))
    row = torch.empty_like(q).scatter_(-1, order, tilt(ranked, g, f, lower, k, most).to(q))
    return row, torch.where(upto > 0, below / upto, 0.0)


def gbv_gains(levels: list[Level], start: Tensor) -> Tensor:
    """Cumulative gain [B, S, L + 1] in E[tau + 1] over the first 0..L levels of the selected
    branch.

    The sum of the block weights w_i along it: unbiased as for block verification (P(tau >= i |
    a_1..a_i) = w_i), with less noise than E[tau + 1 | tree], which would look at rows below.
    `start` [B]: the weight at the branch point.
    """
    member = levels[0].member
    draws = member.sum(-1).double()  # [S]: K of each subset
    w = start.double()[:, None].expand(-1, len(member))
    lower = torch.zeros_like(w)
    alive = member.expand(len(start), -1, -1)
    totals = [torch.zeros_like(w)]
    scores, masses = (x.view(len(levels), -1, x.shape[-1]) for x in _ranks(joined(levels)))
    for level, score, below in zip(levels, scores, masses, strict=True):
        best = torch.where(alive, score[:, None], -1)
        ties = best == best.max(-1, keepdim=True).values
        chosen = torch.where(ties & alive, level.token[:, None], -1).argmax(-1)  # [B, S]
        alive = (
            alive & level.same_next[:, 0][torch.arange(len(w), device=w.device)[:, None], chosen]
        )
        px, qx, under = (x.gather(-1, chosen) for x in (level.px[:, 0], level.qx[:, 0], below))
        g, f = (lower + (1 - lower) * x for x in ((under + qx).clamp(max=1), under))
        w = ratio(w * px, tilt(qx, g, f, lower, draws, member.shape[1]))
        lower = torch.where(g > 0, f / g, 0.0)
        totals.append(totals[-1] + w)
    return torch.stack(totals, -1)


def _ranks(level: Level) -> tuple[Tensor, Tensor]:
    """What the draws [B, K] are ranked by, and the q-mass ranked strictly below them, one chunk of
    rows at a time.
    """
    rows, tokens = level.node.flatten(), level.token.flatten()
    if in_place(level.p):
        places, masses = _ranks_in_place(
            level.p.numpy(), level.q.numpy(), rows.tolist(), tokens.tolist()
        )
    else:
        places = torch.empty(len(rows), device=rows.device)
        masses = torch.empty_like(places, dtype=torch.float64)
        ids = torch.arange(level.q.shape[-1], device=rows.device)
        for at, chunk in row_chunks(level.p, rows):
            q, drawn = level.q[chunk], tokens[at, None]
            score = advantage(level.p[chunk], q)
            low, high = bracket(score.gather(-1, drawn))
            below = (score < low) | ((score < high) & (ids < drawn))
            places[at], masses[at] = low[:, 0], (q * below).sum(-1).double()
    return places.view_as(level.node), masses.clamp_(max=1).view_as(level.node)


def _ranks_in_place(
    p: np.ndarray, q: np.ndarray, rows: list[int], tokens: list[int]
) -> tuple[Tensor, Tensor]:
    """The same, one row after another. Draws of one node use the same scores."""
    places, masses = [0.0] * len(rows), [0.0] * len(rows)
    scratch, score, scored = np.empty_like(q[0]), np.empty(q.shape[-1], np.float32), -1
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for at in sorted(range(len(rows)), key=rows.__getitem__):
            row, token = rows[at], tokens[at]
            if row != scored:
                np.divide(p[row], q[row], out=score, casting="same_kind")
                scored = row
            places[at], _ = found = bracket_of(score[token])
            masses[at] = mass_outside(score, q[row], token, found, scratch)
    return torch.tensor(places), torch.tensor(masses, dtype=torch.float64)
