"""Beam search on the device: how many rows and candidates there are is known before, which they are only there."""

import torch

from decoding.drafter import Drafter
from decoding.ranked import RankedTree


def search(k: int, depth: int, nodes: int, root: int, drafter: Drafter) -> RankedTree:
    """The tree of `Beam.draft`, with any of equally probable candidates, and with those of no draft probability where others
    are too few.

    Candidates are numbered as they are seen, the root first. None is more probable than its parent, so a stable sort by
    probability has parents before their children.
    """
    q, device = drafter.root.q[None], drafter.root.q.device
    own = torch.ones(1, dtype=torch.float64, device=device)  # of the beam's nodes: path probability
    beam = torch.zeros(1, dtype=torch.long, device=device)  # ... and which candidates they are
    sees = torch.zeros(1, 0, dtype=torch.bool, device=device)  # ... and of all expanded nodes those on the way to them
    seen, count = [(own + 1, torch.full_like(beam, root), beam)], 1  # probability (the root's beyond all), token, parent
    for level in range(depth):
        values, tokens = q.topk(min(k, q.shape[-1]), -1)
        values = values.double().nan_to_num(0.0).clamp(max=1)  # rounding may exceed 1
        grown = (own[:, None] * values).flatten()
        seen.append((grown, tokens.flatten(), beam[:, None].expand_as(tokens).flatten()))
        if level + 1 < depth:
            best = grown.argsort(descending=True, stable=True)[:k]
            above = best // tokens.shape[1]
            sees = torch.cat([sees.index_select(0, above), torch.eye(len(best), dtype=torch.bool, device=device)], 1)
            q = drafter.expand_unread(tokens.flatten().index_select(0, best), above, sees)
            own, beam = grown.index_select(0, best), best + count
        count += len(grown)
    probability, token, parent = map(torch.cat, zip(*seen, strict=True))
    order = probability.argsort(descending=True, stable=True)
    kept, rank = order[: nodes + 1], order.argsort()
    above = rank.index_select(0, parent.index_select(0, kept))
    return RankedTree(root, drafter.root.q, token.index_select(0, kept), above, depth)
