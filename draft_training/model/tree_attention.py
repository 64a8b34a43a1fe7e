"""Tree attention in training: a head run over full trees after every root, without a full mask.

With N nodes after each of L tokens a mask would be [L·N, L·N].

For example, two roots of one row of text, each with a tree of depth 2 and k = 2 nodes per level. A
node sees the text up to its root, and its own ancestors and itself:

    text   a b c d          root b: x1, x2 after b; y1, y2 after x1 or x2 (`TreeLevel.parents`)
             ^   ^          root d: likewise

One softmax covers the scores over the text (one matrix product for all nodes) and the few scores
per node over its ancestors. The numbers equal a run of every branch alone, as in decoding.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.targets.document_masks import (
    document_positions,
    entry_documents,
    same_document,
    unseen,
)
from nde_talf.draft_training.targets.target_trees import TreeLevel, take_rows

QUERIES = {"cpu": 256}
"""Queries of one row scored together, by kind of device; others: 4096."""
SCORES = 2**28
"""Most scores over the text in memory, of all heads and rows: 0.5 GB in bfloat16, and about four
times as much for masks, weights and their gradients.

A larger pass is cut into parts of this size, and the backward pass computes each part and the MLP
after it again (`torch.utils.checkpoint`). 8,192 tokens with all roots, k = 4 and 32 heads have 8.6
billion scores at each depth, which took 50 to 100 GB.
"""


def tree_features(
    head: EagleHead,
    tokens: Tensor,
    features: Tensor,
    roots: Tensor,
    levels: Sequence[TreeLevel],
    detach: bool = False,
    document: Tensor | None = None,
) -> list[Tensor]:
    """Return output features of `head` along a sequence and at the nodes of trees after `roots`.

    Args:
        head: any kind.
        tokens: [B, L].
        features: the target's, not yet combined, [B, L, W].
        roots: indices of tokens in 1..L-1, ascending, [R] or [B, R].
        levels: depth 1, 2 and so on.
        detach: stop gradients at the head's own features, which replace the target's after drafted
            tokens.
        document: the document of every token, [B, L]; None where a row is one document.

    Returns:
        Depth 0 at every entry, [B, L-1, H]: row t is the guess at token t + 1. Then [B, R, k, H]
        for each level.
    """
    prefix, length = _Recorder(), tokens.shape[1] - 1
    inside, mask, positions = None, None, torch.arange(length, device=tokens.device)[None]
    if document is not None:
        inside = entry_documents(document)
        mask, positions = same_document(inside, head.dtype), document_positions(document)[:, :-1]
    trunk = head(tokens[:, 1:], positions, mask, prefix, head.combine(features[:, :-1]))
    outputs = [trunk]
    if not levels:
        return outputs

    entries = (roots - 1).expand(len(tokens), -1)  # the entry of root x_r is (x_r, h_{r-1})
    hidden = unseen(entries, length, inside)
    # Positions of the roots' entries [B, R], and how many entries the first r + 1 roots see.
    at = positions.expand(len(tokens), -1).gather(1, entries)
    reach = (entries.amax(0).cummax(0).values + 1).tolist()
    fed = take_rows(trunk, entries)[:, :, None]  # [B, R, 1, H]
    # of each node's path, from depth 1 on: [B, heads, R, k, depth, head_dim]
    keys: Any = None
    values: Any = None
    for depth, level in enumerate(levels, 1):
        fed = _take(fed, level.parents)
        inputs, residual = head.entries(level.tokens, fed.detach() if detach else fed)
        query, key, value = _project(
            head, inputs, (at + depth)[..., None].expand(level.tokens.shape)
        )
        key, value = key[..., None, :], value[..., None, :]
        if depth > 1:
            path = level.parents[:, None, :, :, None, None]
            key, value = (
                torch.cat([old.take_along_dim(path, 3), new], -2)
                for old, new in ((keys, key), (values, value))
            )
        keys, values = key, value
        again = torch.is_grad_enabled() and query.shape[:-1].numel() * length > SCORES
        run = partial(checkpoint, use_reentrant=False) if again else operator.call
        attended = _attend(head, query, prefix, hidden, keys, values, reach, run)
        fed = run(
            lambda states, attended: head.finish(states, head.layers[0].self_attn.o_proj(attended)),
            residual,
            attended,
        )
        outputs.append(fed)
    return outputs


def _project(head: EagleHead, inputs: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Project `inputs` [B, R, k, ·] at `positions` [B, R, k] to queries, keys and values, rotated.

    The query is [B, heads, R, k, head_dim], key and value are [B, kv_heads, R, k, head_dim].
    """
    attention, flat = head.layers[0].self_attn, inputs.flatten(1, 2)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (
        projection(flat).unflatten(-1, (-1, attention.head_dim)) for projection in projections
    )
    if head.family.norms_heads:
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    query, key = apply_rotary_pos_emb(query, key, *head.angles(flat, positions.flatten(1)))
    return tuple(states.unflatten(2, inputs.shape[1:3]) for states in (query, key, value))


def _attend(
    head: EagleHead,
    query: Tensor,
    prefix: "_Recorder",
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: list[int],
    run: Callable[..., Tensor],
) -> Tensor:
    """Attend from nodes to the text and to their own paths, one softmax over both.

    Returns [B, R, k, heads * head_dim]; the text counts where `hidden` [B, R, L-1] is False.

    A few roots at a time: their scores stay in the processor's cache, and text that none of them
    sees is skipped. run: calls a function, perhaps again in the backward pass.
    """
    attention = head.layers[0].self_attn
    groups = attention.num_key_value_groups
    query = query.to(prefix.values.dtype) * attention.scaling
    keys, values = (_repeat(states, groups).to(query.dtype) for states in (keys, values))
    text_keys, text_values = (
        _repeat(states, groups).to(query.dtype) for states in (prefix.keys, prefix.values)
    )
    fits = SCORES // (query.shape[0] * query.shape[1] * hidden.shape[-1])
    some = max(1, min(QUERIES.get(query.device.type, 4096), fits) // query.shape[3])
    parts = [query.new_empty(*query.shape[:2], 0, *query.shape[3:])]
    for start in range(0, query.shape[2], some):
        roots = slice(start, start + some)
        seen = slice(0, reach[min(start + some, len(reach)) - 1])
        nodes = (states[:, :, roots] for states in (query, keys, values))
        text = (states[:, :, seen] for states in (text_keys, text_values))
        parts.append(run(_attend_part, *nodes, *text, hidden[:, None, roots, None, seen]))
    return torch.cat(parts, 2).permute(0, 2, 3, 1, 4).flatten(3)


def _attend_part(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    text_keys: Tensor,
    text_values: Tensor,
    hidden: Tensor,
) -> Tensor:
    """Attend from the nodes of some roots: [B, heads, R, k, head_dim]. See `_attend`."""
    far = (query.flatten(2, 3) @ text_keys.transpose(-1, -2)).unflatten(2, query.shape[2:4])
    far = far.masked_fill(hidden, torch.finfo(far.dtype).min)
    near = (keys @ query[..., None])[..., 0]
    weights = torch.cat([far, near], -1).softmax(-1).to(query.dtype)
    far, near = weights.split([far.shape[-1], near.shape[-1]], -1)
    return (far.flatten(2, 3) @ text_values).unflatten(2, query.shape[2:4]) + (
        near[..., None, :] @ values
    )[..., 0, :]


class _Recorder:
    """Keeps rotated keys and values, with their gradients, in the place of a cache."""

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


def _take(states: Tensor, parents: Tensor) -> Tensor:
    """Take rows `parents` [B, R, k] of states [B, R, m, H]: [B, R, k, H]."""
    if states.shape[2] == 1:
        return states.expand(-1, -1, parents.shape[2], -1)
    return states.take_along_dim(parents[..., None], 2)


def _repeat(states: Tensor, groups: int) -> Tensor:
    """Repeat key/value heads (dimension 1) for their query heads, as `repeat_kv` does."""
    return states if groups == 1 else states.repeat_interleave(groups, 1)
