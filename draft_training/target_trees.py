"""Trees for training, with the target's features as labels: the text itself as chains, and trees that the target builds,
behind every root the beam that it would draft itself.

Level 1 of those holds the k most likely tokens after the root, level d+1 the k best by joint probability of the k * k
candidates below level d (the beam of EAGLE-2, with p in place of q). p = softmax(lm_head h) at any node, so no [nodes, V] is
ever kept. It knows nothing of the head's weights or of losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.common.errors import UserError
from decoding.model import CausalModel
from draft_training.document_masks import document_positions, same_document
from draft_training.head import TreeLevel, take_rows
from draft_training.losses import Labels

# (depth from 1, the roots' places among all roots, the target's features [B, C, m, H] one level up) -> that level's
# nodes
Chooser = Callable[[int, slice, Tensor], TreeLevel]


@dataclass
class TargetTrees:
    """The target's beams of B sequences of L tokens, behind R roots in each.

    tokens [B, L]; features [B, L, W]: the target's along the sequences, which a head takes; roots [B, R]: token indices,
    ascending; levels: depth 1, 2, ...; labels: for each level, the target's features [B, R, k, H] at its nodes, or what a
    store kept of the distributions there; along: the same [B, L, ...] along the sequences.
    """

    tokens: Tensor
    features: Tensor
    roots: Tensor
    levels: list[TreeLevel]
    labels: list[Labels]
    along: Labels


@torch.no_grad()
def target_beam(
    target: CausalModel,
    tokens: Tensor,
    k: int,
    depth: int,
    roots: Tensor | None = None,
    rows: int = 128,
    document: Tensor | None = None,
    layers: Sequence[int] = (),
) -> TargetTrees:
    """The target's beams behind `roots` [R] or [B, R] of `tokens` [B, L] (default: every token but the first, at which a
    head can have no entry). document [B, L]: of every token, None where a row is one document. layers: whose features the head
    takes (`EagleHead.feature_layers`).

    depth counts a head's draft passes: the root, its children, ... ; so levels 1..depth-1 are built and run by the
    target. rows bounds the nodes of one level in one pass over a sequence (and so its mask, [rows, L + depth *
    rows]). Raises UserError if the trees do not fit the target's context or k its vocabulary.
    """
    if not (1 <= k <= target.vocab_size and depth >= 1):
        raise UserError(f"k={k}, depth={depth}: k must lie in 1..{target.vocab_size} and depth be 1 or more.")
    roots = torch.arange(1, tokens.shape[1], device=tokens.device) if roots is None else roots
    joint = torch.empty(0)

    def best(level: int, places: slice, features: Tensor) -> TreeLevel:
        nonlocal joint
        logp = target.logits(features).float().log_softmax(-1)  # [B, C, m, V], for the nodes of one chunk
        top, ids = logp.topk(k, -1)
        joint = top[:, :, 0] if level == 1 else joint[..., None] + top
        if level == 1:
            return TreeLevel(ids[:, :, 0], torch.zeros_like(ids[:, :, 0]))
        joint, winners = joint.flatten(2).topk(k, -1)
        return TreeLevel(ids.flatten(2).gather(2, winners), winners // k)

    return _run(target, tokens, roots, k, depth - 1, best, rows, document, layers)


@torch.no_grad()
def target_levels(
    target: CausalModel,
    tokens: Tensor,
    roots: Tensor,
    levels: Sequence[TreeLevel],
    rows: int = 128,
    document: Tensor | None = None,
) -> list[Tensor]:
    """The target's features [B, R, k, H] at the nodes of given `levels` behind `roots` of `tokens` [B, L]."""

    def given(level: int, places: slice, features: Tensor) -> TreeLevel:
        tree = levels[level - 1]
        return TreeLevel(tree.tokens[:, places], tree.parents[:, places])

    return _run(target, tokens, roots, levels[0].tokens.shape[2], len(levels), given, rows, document).labels


def chains(tokens: Tensor, features: Tensor, roots: Tensor, depth: int) -> TargetTrees:
    """The text itself as trees of one branch: behind `roots` [B, R] of `tokens` [B, L] the next depth - 1 tokens, with the
    target's features [B, L, H] along the text as labels (HASS)."""
    trees = TargetTrees(tokens, features, roots, [], [], features)
    for ahead in range(1, depth):
        places = (roots + ahead).clamp(max=tokens.shape[1] - 1)
        token = tokens.gather(1, places)[..., None]
        trees.levels.append(TreeLevel(token, torch.zeros_like(token)))
        trees.labels.append(take_rows(features, places)[:, :, None])
    return trees


@torch.no_grad()
def target_features(
    target: CausalModel,
    tokens: Tensor,
    document: Tensor | None = None,
    cache: KVCache | None = None,
    layers: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """The target's hidden states [B, L, H] and a head's features [B, L, W] (`CausalModel.parts`) along `tokens` [B, L], each
    document of `document` [B, L] on its own."""
    if document is None:
        positions, mask = torch.arange(tokens.shape[1], device=tokens.device)[None].expand(len(tokens), -1), None
    else:
        positions, mask = document_positions(document), same_document(document, target.dtype)
    return target.parts(target.reader(layers)(tokens, positions, mask, cache), layers)


def _run(
    target: CausalModel,
    tokens: Tensor,
    roots: Tensor,
    k: int,
    depth: int,
    choose: Chooser,
    rows: int,
    document: Tensor | None = None,
    layers: Sequence[int] = (),
) -> TargetTrees:
    """Run `depth` levels of k nodes behind `roots`, as `choose` picks them, roots a few at a time."""
    batch, length = tokens.shape
    if length + depth > target.max_context:
        raise UserError(
            f"length={length}: trees of {depth} tokens behind the last one would pass the target's context of "
            f"{target.max_context}; choose a shorter length."
        )
    cache, roots = KVCache(), roots.expand(batch, -1)
    features, inputs = target_features(target, tokens, document, cache, layers)
    trees = TargetTrees(tokens, inputs, roots, [], [], features)
    if not depth:
        return trees
    parts, chunk = [], max(1, rows // k)
    for start in range(0, roots.shape[1], chunk):
        places = slice(start, start + chunk)
        parts.append(_grow(target, cache, features, roots[:, places], places, k, depth, choose, document))
        cache.commit(length)
    for level in zip(*parts, strict=True):
        trees.levels.append(
            TreeLevel(torch.cat([tree.tokens for tree, _ in level], 1), torch.cat([tree.parents for tree, _ in level], 1))
        )
        trees.labels.append(torch.cat([states for _, states in level], 1))
    return trees


def _grow(
    target: CausalModel,
    cache: KVCache,
    features: Tensor,
    roots: Tensor,
    places: slice,
    k: int,
    depth: int,
    choose: Chooser,
    document: Tensor | None,
) -> list[tuple[TreeLevel, Tensor]]:
    """Each level behind these `roots` [B, C], with its features [B, C, k, H]; `cache` holds the sequences, whose features
    are [B, L, H], and the levels when it is done."""
    batch, count, n, length = len(features), roots.shape[1], roots.shape[1] * k, features.shape[1]
    device, blocked = features.device, torch.finfo(target.dtype).min
    # What a node sees: its document up to its root, and in every level the slot of its ancestor or its own.
    unseen, at = torch.arange(length, device=device) > roots[..., None], roots
    if document is not None:
        unseen = unseen | (document[:, None] != document.gather(1, roots)[..., None])
        at = document_positions(document).gather(1, roots)
    prefix = torch.zeros(unseen.shape, device=device, dtype=target.dtype).masked_fill_(unseen, blocked)
    prefix = prefix.repeat_interleave(k, 1)
    slots = torch.arange(n, device=device).view(1, count, k, 1).expand(batch, -1, -1, -1)
    path, states, levels = slots[..., :0], take_rows(features, roots)[:, :, None], []
    for level in range(1, depth + 1):
        tree = choose(level, places, states)
        if level > 1:
            path = path.gather(2, tree.parents[..., None].expand(-1, -1, -1, level - 1))
        path = torch.cat([path, slots + (level - 1) * n], -1)
        seen = torch.full((batch, n, level * n), blocked, device=device, dtype=target.dtype)
        seen.scatter_(2, path.flatten(1, 2), 0.0)
        mask = torch.cat([prefix, seen], -1)[:, None]
        positions = (at + level).repeat_interleave(k, 1)
        states = target.hidden(tree.tokens.flatten(1), positions, mask, cache).unflatten(1, (count, k))
        levels.append((tree, states))
    return levels
