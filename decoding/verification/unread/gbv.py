"""GBV: the selected branch is a path of known length, so it is verified as one, with q~ in place of q."""

from itertools import pairwise

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.unread import UnreadTree
from decoding.verification.gbv import power_sum
from decoding.verification.ranking import advantage, place, rank_key
from decoding.verification.unread.residual import traversal


def gbv(tree: UnreadTree, rng: Rng) -> tuple[Tensor, Tensor]:
    """See `gbv.gbv`."""
    k = len(tree.levels[-1].token)
    if k == 1:
        return traversal(tree, rng)
    path, nodes = UnreadTree(tree.root, tree.q[0]), [tree.levels[0].first]
    behind = torch.zeros(1, dtype=torch.float64, device=tree.p.device)
    for level, below in pairwise(tree.levels):
        q = torch.stack(tree.q[level.rows]).index_select(0, nodes[-1] - level.start)
        chosen = torch.zeros_like(nodes[0])
        if len(below.token) > 1:
            key = rank_key(advantage(tree.p.index_select(0, nodes[-1]), q))
            rank = place(key, below.token[None])[0]
            chosen = torch.where(below.above == nodes[-1], rank, -1).argmax(0, keepdim=True)
            q, behind = tilted(q, key, k, behind, below.token.index_select(0, chosen))
        path.q[-1] = q[0]
        path.add(below.token.index_select(0, chosen), path.levels[-1].first, path.tips)
        nodes.append(below.first.index_select(0, chosen))
    selected = torch.cat(nodes)
    path.p = tree.p.index_select(0, selected)
    end, token = traversal(path, rng)
    return selected.index_select(0, end), token


def tilted(q: Tensor, key: Tensor, k: int, behind: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """q~ [1, V] of `k` branches, and what `behind` [1] is after `token` [1]; see `gbv.TiltedRow`."""
    order = key.argsort(dim=-1, stable=True)
    ranked = q.gather(-1, order).double()
    g = behind + (1 - behind) * ranked.cumsum(-1).clamp_(max=1)
    f = (g - (1 - behind) * ranked).clamp_(min=0)
    at = (order == token).to(torch.uint8).argmax(-1, keepdim=True)
    upto, below = (x.gather(-1, at)[0] for x in (g, f))
    ranked = ranked * power_sum(g, f, k) / power_sum(1.0, behind, k)
    return torch.empty_like(q).scatter_(-1, order, ranked.to(q)), torch.where(upto > 0, below / upto, 0.0)
