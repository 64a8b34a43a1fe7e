"""Bundles: many i.i.d. paths at once, level by level, for every subset of the paths.

What all label rules walk over.

Shapes: B bundles, S subsets of the K paths, L levels; a draw is a (bundle, path, level), its node
is the row of p and q that it was drawn at. Paths that share a prefix share its node: the row of the
first of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Bundle:
    """K i.i.d. paths from one node, B times over. tokens [B, K, L]; nodes [B, K, L]: row of `p`,
    `q` [R, V] that each token was drawn at.
    """

    p: Tensor
    q: Tensor
    tokens: Tensor
    nodes: Tensor


@dataclass
class Level:
    """One level of a bundle. p, q: the bundle's; token, node [B, K]; px, qx [B, 1, K] (float64):
    the draw's probabilities at its node; member [S, K]; same [B, 1, K, K]: k and j were drawn at
    the same node; siblings [B, S, K, K]: [k, j] is True where members j < k were; same_next [B, 1,
    K, K]: k and j continue with the same token.
    """

    p: Tensor
    q: Tensor
    token: Tensor
    node: Tensor
    px: Tensor
    qx: Tensor
    member: Tensor
    same: Tensor
    siblings: Tensor
    same_next: Tensor

    @cached_property
    def earlier(self) -> Tensor:
        """[B, S, K]: how many member draws came before this one at its node."""
        return self.siblings.sum(-1)

    @cached_property
    def draws(self) -> Tensor:
        """[B, S, K]: how many member draws its node has in all, this one included."""
        return (self.same & self.member[None, :, None, :]).sum(-1)

    @cached_property
    def fresh(self) -> Tensor:
        """[B, S, K]: whether no earlier member draw at its node gave the same token."""
        return ~(self.siblings & self.same_next).any(-1)


def levels(bundle: Bundle, member: Tensor) -> Iterator[Level]:
    """The bundle's levels from the top, for the subsets `member` [S, K] (bool) of its paths."""
    paths = bundle.tokens.shape[1]
    before = torch.ones(paths, paths, dtype=torch.bool, device=bundle.tokens.device).tril(-1)
    both = before & member[:, None, :] & member[:, :, None]
    same = torch.ones_like(before).expand(len(bundle.tokens), 1, -1, -1)
    for level in range(bundle.tokens.shape[2]):
        token = bundle.tokens[:, :, level]
        node = bundle.nodes[:, :, level].gather(1, same[:, 0].to(torch.uint8).argmax(-1))
        same_next = same & (token[:, None, :, None] == token[:, None, None, :])
        px, qx = (rows[node, token].double()[:, None] for rows in (bundle.p, bundle.q))
        yield Level(bundle.p, bundle.q, token, node, px, qx, member, same, same & both, same_next)
        same = same_next


def joined(levels: list[Level]) -> Level:
    """All levels as one of L * B bundles: for what does not depend on the levels above."""
    names = ("token", "node", "px", "qx", "same", "siblings", "same_next")
    return replace(
        levels[0], **{name: torch.cat([getattr(level, name) for level in levels]) for name in names}
    )


def draws_by_row(levels: list[Level], p: Tensor) -> Tensor:
    """[R]: the number of draws at the node of each row of p [R, V]; 0 for a row without a node."""
    counts = torch.zeros(len(p), dtype=torch.long, device=p.device)
    for level in levels:
        counts.scatter_reduce_(0, level.node.flatten(), level.same[:, 0].sum(-1).flatten(), "amax")
    return counts


def none_before(accept: Tensor, siblings: Tensor) -> Tensor:
    """[B, S, K]: probability that every earlier sibling of a draw was rejected, given accept [B, S,
    K].
    """
    return torch.where(siblings, 1 - accept[:, :, None, :], 1.0).prod(-1)


def by_count(table: Tensor, level: Level, count: Tensor) -> Tensor:
    """Table [R, n] looked up at each draw's node and `count` [B, S, K] -> [B, S, K]."""
    rows = table[level.node].unsqueeze(1).expand(-1, count.shape[1], -1, -1)
    return rows.gather(-1, count[..., None])[..., 0]


def at_first(alpha: Tensor, level: Level) -> Tensor:
    """Acceptance rates alpha [R, draws + 1] by row and number of children -> [B, S, K] at each
    node's first member draw.
    """
    return by_count(alpha, level, level.draws) * (level.member & (level.earlier == 0))
