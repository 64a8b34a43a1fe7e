"""GBV, greedy multi-path block verification: verify the branch of highest rank as a path.

At every node tokens are ranked by p / q (ties by id) and branches are compared at the first
position where they differ. The selected branch has a draft law of its own, q~, that favours large p
/ q; block verification with q~ in place of q is lossless (Algorithm 1 and Eq. 25 to 29, GBV paper).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.registry import DELAYED
from nde_talf.decoding.rules.labels.branching import Level
from nde_talf.decoding.rules.ranking import advantage, mass_below, order_of, rank_key
from nde_talf.decoding.rules.residual import node_of, ratio, where
from nde_talf.decoding.rules.sums import row_chunks
from nde_talf.decoding.rules.traversal import traversal
from nde_talf.decoding.rules.walk import rule
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree, Verdict


def power_sum(g: Any, f: Any, k: Any, max_k: int | None) -> Any:
    """Return h_k(g, f) = sum_{j<k} g^j f^{k-1-j} = (g^k - f^k) / (g - f), without cancellation.

    k: a number, or a tensor of numbers up to `max_k`.
    """
    total = power = 1.0
    for j in range(1, k if max_k is None else max_k):
        power = power * g
        total = where(j < k, total * f + power, total)
    return total


def tilt(q: Any, g: Any, f: Any, lower: Any, k: Any, max_k: int | None = None) -> Any:
    """Return q~ of a token (Eq. 27, GBV paper).

    Args:
        q: the token's draft probability.
        g: the fraction of branches that rank as high as the token or lower.
        f: the fraction that rank lower.
        lower: f / g at the token before, 0 at the branch point.
        k: the number of branches.
        max_k: the most branches, where k is a tensor.
    """
    return q * (power_sum(g, f, k, max_k) / power_sum(1.0, lower, k, max_k))


class TiltedRow:
    """q~ at one node of the selected branch.

    One token costs a masked sum. The full row costs a sort, and only a rejection needs it.

    Args:
        p, q: [V].
        k: the number of branches.
        lower: F / G, the fraction of lower-ranked branches so far.
        exact: see `gbv_exact`.
    """

    def __init__(self, p: Tensor, q: Tensor, k: int, lower: float, exact: bool = False):
        self.q, self.k, self.lower, self.exact = q, k, lower, exact
        self.bits = advantage(p, q)
        self._spans: dict[int, tuple[float, float]] = {}

    def place(self, token: int) -> int:
        """Return what `token` is ranked by; ties go to the larger id."""
        return int(self.bits[token]) >> (0 if self.exact else 16)

    def span(self, token: int) -> tuple[float, float]:
        """Return the fractions of branches ranked up to and with `token`, and strictly below."""
        if token not in self._spans:
            below = min(mass_below(self.bits, self.q, token, self.exact), 1.0)
            upto = min(below + float(self.q[token]), 1.0)
            rest = 1 - self.lower
            self._spans[token] = self.lower + rest * upto, self.lower + rest * below
        return self._spans[token]

    def __getitem__(self, token: int) -> float:
        return tilt(float(self.q[token]), *self.span(token), self.lower, self.k)

    def dense(self) -> Tensor:
        """Return the row [V]."""
        order = order_of(rank_key(self.bits, self.exact))
        ranked, rest = self.q[order].double(), 1 - self.lower
        g = self.lower + rest * ranked.cumsum(-1).clamp_(max=1)
        f = (g - rest * ranked).clamp_(min=0)
        tilted = tilt(ranked, g, f, self.lower, self.k).to(self.q)
        return torch.empty_like(tilted).scatter_(-1, order, tilted)


def gbv_gains(levels: list[Level], start: Tensor) -> Tensor:
    """Return cumulative gains [B, S, L + 1] in E[tau + 1] over levels of the selected branch.

    The sum of the block weights w_i along it is unbiased as for block verification (P(tau >= i |
    a_1..a_i) = w_i), with less noise than E[tau + 1 | tree], which would look at rows below.

    start: [B], the weight at the branch point.
    """
    member = levels[0].member
    draws = member.sum(-1).double()  # [S]: K of each subset
    w = start.double()[:, None].expand(-1, len(member))
    lower = torch.zeros_like(w)
    alive = member.expand(len(start), -1, -1)
    totals = [torch.zeros_like(w)]
    for level in levels:
        score, below = _ranks(level)
        best = torch.where(alive, score[:, None], -1)
        ties = best == best.max(-1, keepdim=True).values
        chosen = torch.where(ties & alive, level.token[:, None], -1).argmax(-1)  # [B, S]
        bundles = torch.arange(len(w), device=w.device)[:, None]
        alive = alive & level.same_next[:, 0][bundles, chosen]
        px, qx, under = (x.gather(-1, chosen) for x in (level.px[:, 0], level.qx[:, 0], below))
        g, f = (lower + (1 - lower) * x for x in ((under + qx).clamp(max=1), under))
        w = ratio(w * px, tilt(qx, g, f, lower, draws, member.shape[1]))
        lower = torch.where(g > 0, f / g, 0.0)
        totals.append(totals[-1] + w)
    return torch.stack(totals, -1)


def _ranks(level: Level) -> tuple[Tensor, Tensor]:
    """Return what draws are ranked by, and the q-mass ranked strictly below them; both [B, K].

    Rows are read a chunk at a time.
    """
    p, q, rows, tokens = level.p, level.q, level.node.flatten(), level.token.flatten()
    places = torch.empty_like(rows)
    masses = torch.empty_like(places, dtype=torch.float64)
    ids = torch.arange(q.shape[-1], device=rows.device)
    for at, chunk in row_chunks(p, rows):
        weights, drawn = q[chunk], tokens[at, None]
        key = rank_key(advantage(p[chunk], weights))
        place = key.gather(-1, drawn)
        below = key < place + (ids < drawn)
        places[at], masses[at] = place[:, 0].long(), (weights * below).sum(-1).double()
    return places.view_as(level.node), masses.clamp_(max=1).view_as(level.node)


@rule("gbv", DELAYED, labels=gbv_gains)
@rule("gbv_exact", DELAYED, exact=True)
def gbv(tree: DraftTree, rng: Rng, exact: bool = False) -> Verdict:
    """Verify the selected branch of a delayed tree as a path.

    exact: tokens are ranked by the full float32 of p / q, as in the paper, and not by its upper
    half.
    """
    path, node, nodes, k, lower = DraftTree.rooted(tree.tokens[0]), 0, [0], 1, 0.0
    while children := tree.children[node]:
        chosen, k = children[0], max(k, len(children))  # 1 on the trunk, K from the branch point on
        row: Any = tree.q_at(node)
        if k > 1:
            row = TiltedRow(tree.p[node], row, k, lower, exact)
            chosen = max(
                children, key=lambda child: (row.place(tree.tokens[child]), tree.tokens[child])
            )
            upto, below = row.span(tree.tokens[chosen])
            lower = below / upto if upto > 0 else 0.0
        path.q[-1] = row
        node = chosen
        path.add(len(nodes) - 1, tree.tokens[node])
        nodes.append(node)
    path.p = [tree.p[node] for node in nodes]
    path.nodes = partial(node_of, path)  # no table holds a `TiltedRow`
    end, token = traversal(path, rng)
    return Verdict(nodes[end], token)
