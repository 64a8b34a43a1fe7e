"""Trees that the target builds: behind every root, the beam it would draft itself, and its features there.

Level 1 holds the k most likely tokens after the root, level d+1 the k best by joint probability of the k * k candidates
below level d (the beam of EAGLE-2, with p in place of q). The features are the soft labels: p = softmax(lm_head h) at any
node, so no [nodes, V] is ever kept. It knows nothing of the head that learns from them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.cache import SlotCache
from decoding.errors import UserError
from decoding.model import CausalModel
from draft_training.head import TreeLevel


@dataclass
class TargetTrees:
    """The target's beams of B sequences of L tokens, behind the same R roots in each.

    tokens [B, L]; features [B, L, H]: the target's along the sequences; roots [R]: token indices, ascending; levels:
    depth 1, 2, ...; labels: for each level, the target's features [B, R, k, H] at its nodes.
    """

    tokens: Tensor
    features: Tensor
    roots: Tensor
    levels: list[TreeLevel]
    labels: list[Tensor]


@torch.no_grad()
def target_beam(
    target: CausalModel,
    tokens: Tensor,
    k: int,
    depth: int,
    roots: Tensor | None = None,
    rows: int = 256,
) -> TargetTrees:
    """The target's beams behind `roots` of `tokens` [B, L] (default: every token but the first, at which a head can have
    no entry).

    depth counts a head's draft passes: the root, its children, ... ; so levels 1..depth-1 are built and run by the target.
    rows bounds the nodes of one level in one pass of a sequence (and so the mask, [rows, L + depth * rows]). Raises
    UserError if the trees do not fit the target's context or k its vocabulary.
    """
    batch, length = tokens.shape
    if length + depth - 1 > target.max_context:
        raise UserError(
            f"length={length}: trees of depth {depth} behind the last token would pass the target's context of "
            f"{target.max_context} tokens; choose a shorter length."
        )
    if not (1 <= k <= target.vocab_size and depth >= 1):
        raise UserError(f"k={k}, depth={depth}: k must lie in 1..{target.vocab_size} and depth be 1 or more.")
    device = tokens.device
    roots = torch.arange(1, length, device=device) if roots is None else roots
    cache = SlotCache()
    positions = torch.arange(length, device=device)
    features = target.hidden(tokens, positions[None].expand(batch, -1), None, cache)
    trees = TargetTrees(tokens, features, roots, [], [])
    if depth > 1:
        parts = []
        for chunk in roots.split(max(1, rows // k)):
            parts.append(_grow(target, cache, features[:, chunk], chunk, k, depth))
            cache.keep(length)
        for level in zip(*parts, strict=True):
            tokens_, parents, labels = (torch.cat(part, 1) for part in zip(*level, strict=True))
            trees.levels.append(TreeLevel(tokens_, parents))
            trees.labels.append(labels)
    return trees


def _grow(
    target: CausalModel, cache: SlotCache, features: Tensor, roots: Tensor, k: int, depth: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, parents, features) of each level behind C `roots`, whose features [B, C, H] are given and whose sequences
    `cache` holds."""
    batch, count, _ = features.shape
    length, n = cache.length, count * k
    device, blocked = features.device, torch.finfo(target.dtype).min
    # What a node sees: the sequence up to its root; its ancestors' slots and its own, one a level.
    prefix = torch.zeros(count, length, device=device, dtype=target.dtype)
    prefix.masked_fill_(torch.arange(length, device=device) > roots[:, None], blocked)
    prefix = prefix.repeat_interleave(k, 0)[None].expand(batch, -1, -1)
    slots = torch.arange(n, device=device).view(1, count, k).expand(batch, -1, -1)
    path = slots[..., :0].reshape(batch, count, k, 0)
    joint = torch.zeros(batch, count, 1, device=device)
    states, levels = features[:, :, None], []
    for level in range(1, depth):
        # [B, C, m, V] only for the nodes of this chunk
        logp = target.logits(states).float().log_softmax(-1)
        top, ids = logp.topk(k, -1)
        joint, best = (joint[..., None] + top).flatten(2).topk(k, -1)
        parents, tokens = best // k, ids.flatten(2).gather(2, best)
        if level > 1:
            path = path.gather(2, parents[..., None].expand(-1, -1, -1, level - 1))
        path = torch.cat([path, slots[..., None] + (level - 1) * n], -1)
        tree = torch.full((batch, n, level * n), blocked, device=device, dtype=target.dtype)
        tree.scatter_(2, path.flatten(1, 2), 0.0)
        mask = torch.cat([prefix, tree], -1)[:, None]
        positions = (roots + level).repeat_interleave(k)[None].expand(batch, -1)
        states = target.hidden(tokens.flatten(1), positions, mask, cache).unflatten(1, (count, k))
        levels.append((tokens, parents, states))
    return levels
