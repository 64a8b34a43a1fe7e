"""Trees for training, with the target's features as labels: its beams, or the text as chains.

After every root the target builds the tree that it would draft itself. Level 1 holds the k most
likely tokens after the root. Level d + 1 holds the k best by joint probability among the k * k
candidates below level d (the beam of EAGLE-2, with p in place of q). p = softmax(lm_head h) at any
node, so that [nodes, V] is never kept. Nothing here knows the head's weights or losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.document_masks import document_positions, same_document, unseen
from nde_talf.draft_training.tree_attention import TreeLevel, take_rows

# (depth from 1, which of all roots [a slice of C], the target's features [B, C, m, H] one level up)
# -> that level's nodes
Chooser = Callable[[int, slice, Tensor], TreeLevel]


@dataclass(frozen=True)
class TreeSpec:
    """The shape of the trees after every root.

    Args:
        k: nodes of each level.
        depth: draft passes of a head: the root, its children and so on. Levels 1..depth-1 are built
            and run by the target.
        rows: nodes of one level that go through the target in one pass over a sequence; its mask is
            [rows, L + depth * rows].
    """

    k: int = 4
    depth: int = 3
    rows: int = 128


@dataclass
class TargetTrees:
    """Trees of B sequences of L tokens, after R roots in each.

    Args:
        tokens: of the sequences, [B, L].
        features: the target's along the sequences, which a head takes, [B, L, W].
        roots: indices of tokens, ascending, [B, R].
        levels: depth 1, 2 and so on.
        labels: for each level, the target's features after the final norm at its nodes, [B, R, k,
            H].
        along: those along the sequences, [B, L, H].
    """

    tokens: Tensor
    features: Tensor
    roots: Tensor
    levels: list[TreeLevel]
    labels: list[Tensor]
    along: Tensor


@torch.no_grad()
def target_beam(
    target: CausalModel,
    tokens: Tensor,
    tree: TreeSpec,
    roots: Tensor,
    document: Tensor | None,
    layers: Sequence[int] = (),
) -> TargetTrees:
    """The target's beams after `roots`.

    Args:
        target: builds the trees.
        tokens: [B, L].
        tree: their shape.
        roots: indices of tokens, [R] or [B, R]. The first token is no root: a head has no entry
            there.
        document: the document of every token, [B, L]; None where a row is one document.
        layers: of the target, whose features the head takes (`EagleHead.feature_layers`).

    Raises:
        UserError: the trees do not fit the target's context, or k its vocabulary.
    """
    if not (1 <= tree.k <= target.vocab_size and tree.depth >= 1):
        raise UserError(
            f"k={tree.k}, depth={tree.depth}: k must lie in 1..{target.vocab_size} and depth be 1"
            " or more."
        )

    joint = torch.empty(0)

    def best(level: int, some: slice, features: Tensor) -> TreeLevel:
        nonlocal joint
        logp = (
            target.logits(features).float().log_softmax(-1)
        )  # [B, C, m, V], for the nodes of one chunk
        top, ids = logp.topk(tree.k, -1)
        joint = top[:, :, 0] if level == 1 else joint[..., None] + top
        if level == 1:
            return TreeLevel(ids[:, :, 0], torch.zeros_like(ids[:, :, 0]))
        joint, winners = joint.flatten(2).topk(tree.k, -1)
        return TreeLevel(ids.flatten(2).gather(2, winners), winners // tree.k)

    return _run(target, tokens, roots, tree, best, document, layers)


@torch.no_grad()
def target_levels(
    target: CausalModel,
    tokens: Tensor,
    roots: Tensor,
    levels: list[TreeLevel],
    document: Tensor | None = None,
) -> list[Tensor]:
    """Compute the target's features [B, R, k, H] at the nodes of given `levels` of trees.

    The trees stand after `roots` of `tokens` [B, L].
    """

    def given(level: int, some: slice, features: Tensor) -> TreeLevel:
        return TreeLevel(levels[level - 1].tokens[:, some], levels[level - 1].parents[:, some])

    tree = TreeSpec(levels[0].tokens.shape[2], len(levels) + 1)
    return _run(target, tokens, roots, tree, given, document).labels


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

    Each document of `document` [B, L] is run for itself; see `CausalModel.parts`.
    """
    if document is None:
        positions, mask = (
            torch.arange(tokens.shape[1], device=tokens.device)[None].expand(len(tokens), -1),
            None,
        )
    elif target.form != "masks":
        states = [
            target.session(layers).append(part)
            for row, ids in zip(tokens, document, strict=True)
            for part in _documents(row, ids)
        ]
        return target.parts(torch.cat(states).view(*tokens.shape, -1), layers)
    else:
        positions, mask = document_positions(document), same_document(document, target.dtype)
    return target.parts(target.reader(layers)(tokens, positions, mask, cache), layers)


def _run(
    target: CausalModel,
    tokens: Tensor,
    roots: Tensor,
    tree: TreeSpec,
    choose: Chooser,
    document: Tensor | None = None,
    layers: Sequence[int] = (),
) -> TargetTrees:
    """Run the levels after `roots`, as `choose` picks their nodes, roots a few at a time."""
    (batch, length), depth, k = tokens.shape, tree.depth - 1, tree.k
    if length + depth > target.max_context:
        room = target.max_context - depth
        raise UserError(
            f"length={length}: with trees of {depth} tokens the target's context has room for"
            f" {room}; shorten it."
        )
    roots = roots.expand(batch, -1)
    cache = KVCache() if target.form == "masks" else None
    features, inputs = target_features(target, tokens, document, cache, layers)
    device, dtype, blocked = features.device, target.dtype, torch.finfo(target.dtype).min
    # of each level, for some roots: tokens, parents, labels
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in range(depth)]
    chunk = max(1, tree.rows // k)
    for start in range(0, roots.shape[1] if depth else 0, chunk):
        some = slice(start, start + chunk)
        at = entries = roots[:, some]
        n = entries.shape[1] * k
        if document is not None:
            at = document_positions(document).gather(1, entries)
        if cache is None:
            states = take_rows(features, entries)[:, :, None]
            run = _branches(target, tokens, entries, at)
            for level in range(1, tree.depth):
                chosen = choose(level, some, states)
                states = run(chosen.tokens, chosen.parents + (level - 2) * k if level > 1 else None)
                parts[level - 1].append((chosen.tokens, chosen.parents, states))
            continue
        # What a node sees: its document up to its root, and in every level the slot of its ancestor
        # or its own.
        hidden = unseen(entries, length, document)
        prefix = (
            torch.zeros(hidden.shape, device=device, dtype=dtype)
            .masked_fill_(hidden, blocked)
            .repeat_interleave(k, 1)
        )
        slots = torch.arange(n, device=device).view(1, -1, k, 1).expand(batch, -1, -1, -1)
        path, states = slots[..., :0], take_rows(features, entries)[:, :, None]
        for level in range(1, tree.depth):
            chosen = choose(level, some, states)
            if level > 1:
                path = path.take_along_dim(chosen.parents[..., None], 2)
            path = torch.cat([path, slots + (level - 1) * n], -1)
            seen = torch.full((batch, n, level * n), blocked, device=device, dtype=dtype).scatter_(
                2, path.flatten(1, 2), 0.0
            )
            mask, positions = (
                torch.cat([prefix, seen], -1)[:, None],
                (at + level).repeat_interleave(k, 1),
            )
            states = target.hidden(chosen.tokens.flatten(1), positions, mask, cache).unflatten(
                1, (-1, k)
            )
            parts[level - 1].append((chosen.tokens, chosen.parents, states))
        cache.commit(length)
    full = [[torch.cat(each, 1) for each in zip(*level, strict=True)] for level in parts]
    levels, labels = (
        [TreeLevel(tokens, parents) for tokens, parents, _ in full],
        [states for *_, states in full],
    )
    return TargetTrees(tokens, inputs, roots, levels, labels, features)


def _documents(row: Tensor, document: Tensor) -> list[list[int]]:
    """Split the tokens of a row [L] into its documents."""
    lengths = document.unique_consecutive(return_counts=True)[1].tolist()
    return [part.tolist() for part in row.split(lengths)]


def _branches(
    target: CausalModel, tokens: Tensor, roots: Tensor, positions: Tensor
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Begin trees of a target that is scored branch by branch, a session each.

    roots: [B, C], in `tokens` [B, L]; positions: in their documents.
    """
    sessions = []
    for row, entries, at in zip(tokens.tolist(), roots.tolist(), positions.tolist(), strict=True):
        start, text = -1, target.session()
        for entry, position in zip(entries, at, strict=True):
            if entry - position != start:
                start, text = entry - position, target.session()
            sessions.append(text.at(row[start:], position + 1))

    def run(level: Tensor, above: Tensor | None) -> Tensor:
        """Hidden states [B, C, k, H] of a level's tokens [B, C, k] below rows `above`."""
        rows = level.flatten(0, 1)
        parents = torch.full_like(rows, -1) if above is None else above.flatten(0, 1)
        trees = zip(sessions, rows.tolist(), parents.tolist(), strict=True)
        states = torch.stack([session.grow(*tree) for session, *tree in trees])
        return states.unflatten(0, level.shape[:2])

    return run
