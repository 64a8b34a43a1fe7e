"""Trees for training, with the target's features as labels: its beams, or the text as chains.

After every root the target builds the tree that it would draft by itself. Level 1 holds the k most
likely tokens after the root. Level d + 1 holds the k best by joint probability among the k * k
candidates below level d (the beam of EAGLE-2, with p in place of q). p = softmax(lm_head h) at any
node, so that [nodes, V] is never kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.targets.document_masks import document_positions, same_document, unseen

ROWS = 128
"""Most nodes of one level in a pass of the target; the mask is [ROWS, L + depth * ROWS]."""


@dataclass
class TreeLevel:
    """One depth d >= 1 of the trees after R roots, k nodes each.

    Args:
        tokens: the nodes' tokens, [B, R, k].
        parents: the index of each node's parent among the k nodes one level up, [B, R, k]. 0 at
            depth 1, whose parent is the root.
    """

    tokens: Tensor
    parents: Tensor


# (depth from 1, a slice of R roots, the target's features [B, R, m, H] one level up) -> the level
Chooser = Callable[[int, slice, Tensor], TreeLevel]


@dataclass
class TargetTrees:
    """Trees of B sequences of L tokens, after R roots in each.

    Args:
        tokens: of the sequences, [B, L].
        features: the target's along the sequences, as inputs of a head, [B, L, W].
        roots: indices of tokens, ascending, [B, R].
        levels: depth 1, 2 and so on.
        labels: for each level, the target's features after the final norm at its nodes, [B, R, k,
            H].
        along: the same along the sequences, [B, L, H].
    """

    tokens: Tensor
    features: Tensor
    roots: Tensor
    levels: list[TreeLevel]
    labels: list[Tensor]
    along: Tensor


def take_rows(states: Tensor, index: Tensor) -> Tensor:
    """Take rows `index` [B, R] of states [B, L, ...]: [B, R, ...]."""
    return states[torch.arange(len(states), device=states.device)[:, None], index]


@torch.no_grad()
def target_beam(
    target: CausalModel,
    tokens: Tensor,
    k: int,
    depth: int,
    roots: Tensor,
    document: Tensor | None,
    layers: Sequence[int] = (),
) -> TargetTrees:
    """Build the target's beams after `roots`.

    Args:
        target: builds the trees.
        tokens: [B, L].
        k: nodes of each level.
        depth: draft passes of a head: the root, its children and so on. Levels 1..depth-1 are built
            and run by the target.
        roots: indices of tokens, [R] or [B, R]. The first token is no root: it has no entry.
        document: the document of every token, [B, L]; None where a row is one document.
        layers: of the target, for the head's features (`EagleHead.feature_layers`).

    Raises:
        UserError: the trees do not fit the target's context, or k its vocabulary.
    """
    if not (1 <= k <= target.vocab_size and depth >= 1):
        raise UserError(
            f"k={k}, depth={depth}: k must lie in 1..{target.vocab_size} and depth be 1 or more."
        )

    joint = torch.empty(0)

    def best(level: int, some: slice, features: Tensor) -> TreeLevel:
        nonlocal joint
        # [B, R, m, V], for the nodes of one chunk
        logp = target.logits(features).float().log_softmax(-1)
        top, ids = logp.topk(k, -1)
        joint = top[:, :, 0] if level == 1 else joint[..., None] + top
        if level == 1:
            return TreeLevel(ids[:, :, 0], torch.zeros_like(ids[:, :, 0]))
        joint, winners = joint.flatten(2).topk(k, -1)
        return TreeLevel(ids.flatten(2).gather(2, winners), winners // k)

    return _run(target, tokens, roots, k, depth, best, document, layers)


@torch.no_grad()
def target_levels(
    target: CausalModel,
    tokens: Tensor,
    roots: Tensor,
    levels: list[TreeLevel],
    document: Tensor | None,
) -> list[Tensor]:
    """Compute the target's features [B, R, k, H] at the nodes of given `levels` of trees.

    The trees follow `roots` of `tokens` [B, L].
    """

    def given(level: int, some: slice, features: Tensor) -> TreeLevel:
        return TreeLevel(levels[level - 1].tokens[:, some], levels[level - 1].parents[:, some])

    k, depth = levels[0].tokens.shape[2], len(levels) + 1
    return _run(target, tokens, roots, k, depth, given, document).labels


def chains(tokens: Tensor, features: Tensor, roots: Tensor, depth: int) -> TargetTrees:
    """Take the text itself as trees of one branch (HASS).

    After `roots` [B, R] of `tokens` [B, L] come the next depth - 1 tokens, with the target's
    features [B, L, H] along the text as labels.
    """
    trees = TargetTrees(tokens, features, roots, [], [], features)
    for ahead in range(1, depth):
        index = (roots + ahead).clamp(max=tokens.shape[1] - 1)
        token = tokens.gather(1, index)[..., None]
        trees.levels.append(TreeLevel(token, torch.zeros_like(token)))
        trees.labels.append(take_rows(features, index)[:, :, None])
    return trees


@torch.no_grad()
def target_features(
    target: CausalModel,
    tokens: Tensor,
    document: Tensor | None,
    cache: KVCache | None = None,
    layers: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Compute the target's hidden states [B, L, H] and a head's features [B, L, W] along `tokens`.

    Each document of `document` [B, L] is run by itself; see `CausalModel.parts`.
    """
    if document is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        mask = None
    elif target.form != "masks":
        states = [
            target.session(layers).append(part.tolist())
            for row, ids in zip(tokens, document, strict=True)
            for part in row.split(ids.unique_consecutive(return_counts=True)[1].tolist())
        ]
        return target.parts(torch.cat(states).view(*tokens.shape, -1), layers)
    else:
        positions, mask = document_positions(document), same_document(document, target.dtype)
    return target.parts(target.reader(layers)(tokens, positions, mask, cache), layers)


def _run(
    target: CausalModel,
    tokens: Tensor,
    roots: Tensor,
    k: int,
    passes: int,
    choose: Chooser,
    document: Tensor | None = None,
    layers: Sequence[int] = (),
) -> TargetTrees:
    """Run the levels that `choose` picks after `roots`, a few roots at a time."""
    (batch, length), depth = tokens.shape, passes - 1
    if length + depth > target.max_context:
        room = target.max_context - depth
        raise UserError(
            f"length={length}: with trees of {depth} tokens the target's context has room for"
            f" {room}; shorten it."
        )
    roots = roots.expand(batch, -1)
    cache = KVCache() if target.form == "masks" else None
    features, inputs = target_features(target, tokens, document, cache, layers)
    # of each level, for some roots: tokens, parents, labels
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in range(depth)]
    chunk = max(1, ROWS // k)
    for start in range(0, roots.shape[1] if depth else 0, chunk):
        some = slice(start, start + chunk)
        entries = roots[:, some]
        at = entries if document is None else document_positions(document).gather(1, entries)
        if cache is None:
            run = _branches(target, tokens, entries, at)
        else:
            run = _masked(target, cache, unseen(entries, length, document), at, k)
        states = take_rows(features, entries)[:, :, None]
        for number, level in enumerate(parts, 1):
            chosen = choose(number, some, states)
            states = run(chosen)
            level.append((chosen.tokens, chosen.parents, states))
        if cache is not None:
            cache.commit(length)
    trees = TargetTrees(tokens, inputs, roots, [], [], features)
    for level in parts:
        nodes, parents, states = (torch.cat(each, 1) for each in zip(*level, strict=True))
        trees.levels.append(TreeLevel(nodes, parents))
        trees.labels.append(states)
    return trees


def _masked(
    target: CausalModel, cache: KVCache, hidden: Tensor, positions: Tensor, k: int
) -> Callable[[TreeLevel], Tensor]:
    """Begin trees of k nodes per level, one pass per level.

    hidden: tokens hidden from the roots, bool [B, R, L]; positions: of the roots in their
    documents, [B, R].
    """
    batch, count, _ = hidden.shape
    n, device, dtype = count * k, hidden.device, target.dtype
    blocked = torch.finfo(dtype).min
    # A node sees its document up to its root, and on every level the slot of its ancestor, or its
    # own.
    prefix = torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, blocked)
    prefix = prefix.repeat_interleave(k, 1)
    slots = torch.arange(n, device=device).view(1, -1, k, 1).expand(batch, -1, -1, -1)
    path = slots[..., :0]

    def run(level: TreeLevel) -> Tensor:
        nonlocal path
        depth = path.shape[-1]
        if depth:
            path = path.take_along_dim(level.parents[..., None], 2)
        path = torch.cat([path, slots + depth * n], -1)
        seen = torch.full((batch, n, (depth + 1) * n), blocked, device=device, dtype=dtype)
        seen = seen.scatter_(2, path.flatten(1, 2), 0.0)
        mask = torch.cat([prefix, seen], -1)[:, None]
        at = (positions + depth + 1).repeat_interleave(k, 1)
        return target.hidden(level.tokens.flatten(1), at, mask, cache).unflatten(1, (-1, k))

    return run


def _branches(
    target: CausalModel, tokens: Tensor, roots: Tensor, positions: Tensor
) -> Callable[[TreeLevel], Tensor]:
    """Begin trees of a target that scores branch by branch, with a session per tree.

    roots: [B, R], in `tokens` [B, L]; positions: in their documents.
    """
    sessions = []
    for row, entries, at in zip(tokens.tolist(), roots.tolist(), positions.tolist(), strict=True):
        start, text = -1, target.session()
        for entry, position in zip(entries, at, strict=True):
            if entry - position != start:
                start, text = entry - position, target.session()
            sessions.append(text.at(row[start:], position + 1))

    above: int | None = None  # rows of a tree before its last level

    def run(level: TreeLevel) -> Tensor:
        nonlocal above
        parents = torch.full_like(level.parents, -1) if above is None else level.parents + above
        above = 0 if above is None else above + level.tokens.shape[2]
        rows = level.tokens.flatten(0, 1).tolist(), parents.flatten(0, 1).tolist()
        trees = zip(sessions, *rows, strict=True)
        states = torch.stack([session.grow(*tree) for session, *tree in trees])
        return states.unflatten(0, level.tokens.shape[:2])

    return run
