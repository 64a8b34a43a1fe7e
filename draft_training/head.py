"""The EAGLE draft head: one decoder layer over (next token, the target's feature), read out by the target's own
lm_head.

Entry t of a sequence is the pair (x_{t+1}, h_t), h_t the target's feature at token t. The head turns it into f_{t+1}, a
guess of h_{t+1}, and lm_head(f_{t+1}) is its distribution of x_{t+2}. Behind drafted tokens, where the target has not
been, f takes the place of h. The head runs in two ways with the same numbers: `forward` grows a tree through a cache,
as decoding does, and `tree_features` runs whole trees behind every root of a sequence, as training does. It knows
nothing of losses, of how trees are chosen, or of files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from decoding.cache import KVCache
from decoding.model import CausalModel
from draft_training.document_masks import document_positions, entry_documents, same_document
from draft_training.families import family_of, layer_config, rotary_of
from draft_training.settings import FAMILY

# Root mean square of a fresh head's first state: of its part from the embedding, and from a feature of size 1.
_EMBEDDING_SHARE, _FEATURE_SHARE = 0.5, 0.3
# Queries of one row whose scores over the prefix are computed together.
_QUERIES, _MANY_QUERIES = {"cpu": 256}, 4096


@dataclass
class TreeLevel:
    """One depth d >= 1 of the trees behind R roots: k nodes each.

    tokens [B, R, k]: the node's token. parents [B, R, k]: index of its parent among the k nodes one level up (0 at
    depth 1, whose parent is the root).
    """

    tokens: Tensor
    parents: Tensor


class EagleHead(nn.Module):
    """A head for `target`, randomly initialised from torch's global generator.

    layer: "family" for a decoder layer of the target's family, "llama" for a Llama layer beside any target. Its parameters,
    and so its state dict, are those of the exported file; the target's embedding and lm_head are used through `target`,
    frozen, and are no part of the module. Raises UserError for a target that no head can be built on.

    feature_layers: of the target, whose features the head takes (`CausalModel.reader`); empty: those after the final norm.
    vocabulary: ids [D] of the tokens it can draft, ascending; None: all. trained_in: Lightning's name of the precision of its
    training, None where it is not known.
    """

    kind = "eagle"
    trained_in: str | None = None
    feature_layers: tuple[int, ...] = ()
    vocabulary: Tensor | None = None

    def __init__(self, target: CausalModel, layer: str = FAMILY):
        super().__init__()
        self.family = family_of(target, layer)
        self.config = layer_config(target, self.family)
        self.target = target
        self._build(self.config.hidden_size, self.family.layer(self.config, 0))
        self.rotary, self._angles = rotary_of(self.family, self.config)
        self._initialise()
        self.to(target.device, target.dtype)

    def _build(self, hidden: int, decoder: nn.Module) -> None:
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        decoder.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([decoder])

    def _initialise(self) -> None:
        # A head begins as a layer over the token just drawn, its embedding scaled towards the size of the features
        # (embeddings are often 10 times smaller), with some of the feature mixed in at random. Started as "the feature
        # stays as it is", it learned far more slowly and was worse still where its own features are fed back.
        hidden = self.config.hidden_size
        scale = self._embedding.float().pow(2).mean().sqrt().clamp(min=1e-6).item()
        std = getattr(self.target.config, "initializer_range", 0.02)
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=std)
                elif name.endswith("bias"):
                    parameter.zero_()
            self.fc.weight[:, :hidden] = _EMBEDDING_SHARE * torch.eye(hidden) / scale
            self.fc.weight[:, hidden:].normal_(std=_FEATURE_SHARE * hidden**-0.5)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def _embedding(self) -> Tensor:
        return self.target.module.get_input_embeddings().weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [..., H] of the target's embedding matrix for `tokens` [...]. A family that scales them in its models (Gemma)
        does not here: fc holds any factor, and other engines share the matrix, not what a model does with it."""
        return F.embedding(tokens, self._embedding)

    @property
    def readout(self) -> Tensor:
        """The matrix [V, H] that reads the head out; [D, H] where it has a `vocabulary`."""
        return self.target.lm_head.weight

    def read(self, outputs: Tensor) -> Tensor:
        """What `readout` reads [..., H] of output features [..., H]: these themselves."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., V] of output features [..., H]."""
        return F.linear(self.read(outputs), self.readout)

    def combine(self, features: Tensor) -> Tensor:
        """Of the target's features [..., W] those [..., H] that an entry takes, whose place output features take behind drafted
        tokens: these themselves."""
        return features

    def file_weights(self) -> dict[str, Tensor]:
        """The weights by name, as an exported file holds them."""
        return self.state_dict()

    def load_file_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over what `file_weights` gave."""
        self.load_state_dict(weights)

    def _entries(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Of the entries (tokens [...], features [..., H]) what attention reads and what it is added to."""
        entries = self.fc(torch.cat([self.embed(tokens), features], -1))
        return entries, entries

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, features: Tensor
    ) -> Tensor:
        """Output features [B, n, H] of the entries (tokens [B, n], features [B, n, H]) at `positions` [B, n].

        `mask` [B or 1, 1, n, cached + n] is additive; None lets every entry see what is cached and the entries before
        it.
        """
        entries, residual = self._entries(tokens, features)
        how = {
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": cache,
            "position_embeddings": self._angles(residual, positions),
        }
        return self._run_layer(entries, residual, how)

    def _run_layer(self, entries: Tensor, residual: Tensor, how: dict[str, Any]) -> Tensor:
        return self.layers[0](entries, **how)

    def tree_features(
        self,
        tokens: Tensor,
        features: Tensor,
        roots: Tensor,
        levels: Sequence[TreeLevel],
        detach: bool = False,
        document: Tensor | None = None,
    ) -> list[Tensor]:
        """Output features of a sequence and of the trees behind `roots`, as decoding would compute them branch by
        branch.

        tokens [B, L]; features [B, L, W]: the target's, not yet combined; roots [R] or [B, R]: token indices in 1..L-1,
        ascending; levels: depth 1, 2, ... ; document [B, L]: of every token, None where a row is one document. Returns depth 0
        at *every* entry, [B, L-1, H] (row t is f_{t+1}, the guess at token t+1), then [B, R, k, H] for each level. A node
        attends to the entries up to its root's (in its document), whose keys come from the target's features, and to its
        ancestors, whose keys come from fed-back output features: prefix and ancestor scores under one softmax. `detach` stops
        gradients at the fed-back features.
        """
        prefix = _Recorder()
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        index, mask, places = positions, None, positions[None]
        if document is not None:
            inside = entry_documents(document)
            mask, places = same_document(inside, features.dtype), document_positions(document)[:, :-1]
        trunk = self.forward(tokens[:, 1:], places, mask, prefix, self.combine(features[:, :-1]))
        outputs = [trunk]
        if not levels:
            return outputs

        entries = (roots - 1).expand(len(tokens), -1)  # the entry of root x_r is (x_r, h_{r-1})
        hidden_from = index > entries[..., None]  # [B, R, L-1]
        if document is not None:
            hidden_from = hidden_from | (inside[:, None] != inside.gather(1, entries)[..., None])
        at = places.expand(len(tokens), -1).gather(1, entries)  # position of the root's entry, [B, R]
        reach = (entries.amax(0).cummax(0).values + 1).tolist()
        fed = take_rows(trunk, entries)[:, :, None]  # [B, R, 1, H]
        keys = values = None  # of each node's path from depth 1 down: [B, heads, R, k, depth, head_dim]
        for depth, level in enumerate(levels, 1):
            fed = _take(fed, level.parents)
            inputs, residual = self._entries(level.tokens, fed.detach() if detach else fed)
            query, key, value = self._project(inputs, (at + depth)[..., None].expand(level.tokens.shape))
            key, value = key[..., None, :], value[..., None, :]
            if depth > 1:
                key = torch.cat([_take_path(keys, level.parents), key], -2)
                value = torch.cat([_take_path(values, level.parents), value], -2)
            keys, values = key, value
            attended = self._attend(query, prefix.keys, prefix.values, hidden_from, keys, values, reach)
            fed = self._finish(residual, self.layers[0].self_attn.o_proj(attended))
            outputs.append(fed)
        return outputs

    def _project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, heads, R, k, head_dim], key and value [B, kv_heads, R, k, head_dim] of `inputs` [B, R, k, ·] at
        `positions` [B, R, k], rotated."""
        attention = self.layers[0].self_attn
        roots, width = inputs.shape[1:3]
        flat = inputs.flatten(1, 2)
        query, key, value = (
            projection(flat).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.family.norms_heads:
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *self._angles(flat, positions.flatten(1)))
        return tuple(states.unflatten(2, (roots, width)) for states in (query, key, value))

    def _attend(
        self,
        query: Tensor,
        prefix_keys: Tensor,
        prefix_values: Tensor,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        reach: list[int],
    ) -> Tensor:
        """Attention [B, R, k, heads * head_dim] of nodes to the prefix (where `hidden` [B, R, L-1] is False) and to their own
        paths, one softmax over both. reach [R]: how many entries the first r + 1 roots see at most. Roots go a few at a time:
        their scores stay in the processor's cache, and what none of them sees is not computed."""
        attention = self.layers[0].self_attn
        groups = attention.num_key_value_groups
        query = query.to(prefix_values.dtype) * attention.scaling
        keys, values = (_repeat(states, groups).to(query.dtype) for states in (keys, values))
        prefix_keys, prefix_values = (repeat_kv(states, groups).to(query.dtype) for states in (prefix_keys, prefix_values))
        some = max(1, _QUERIES.get(query.device.type, _MANY_QUERIES) // query.shape[3])
        parts = [query.new_empty(*query.shape[:2], 0, *query.shape[3:])]
        for start in range(0, query.shape[2], some):
            roots = slice(start, start + some)
            seen = slice(0, reach[min(start + some, len(reach)) - 1])
            parts.append(
                _attend_some(
                    query[:, :, roots], prefix_keys[:, :, seen], prefix_values[:, :, seen], hidden[:, roots, seen],
                    keys[:, :, roots], values[:, :, roots],
                )
            )  # fmt: skip
        return torch.cat(parts, 2).permute(0, 2, 3, 1, 4).flatten(3)

    def _finish(self, inputs: Tensor, attended: Tensor) -> Tensor:
        """What the decoder layer does behind its attention."""
        layer = self.layers[0]
        if not self.family.sandwich:
            states = inputs + attended
            return states + layer.mlp(layer.post_attention_layernorm(states))
        states = inputs + layer.post_attention_layernorm(attended)
        return states + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(states)))


def _attend_some(
    query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, hidden: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attention [B, heads, R, k, head_dim] of scaled `query` to prefix and paths."""
    roots, width = query.shape[2:4]
    far = (query.flatten(2, 3) @ prefix_keys.transpose(-1, -2)).unflatten(2, (roots, width))
    far = far.masked_fill(hidden[:, None, :, None], torch.finfo(far.dtype).min)
    near = (keys @ query[..., None])[..., 0]
    weights = torch.cat([far, near], -1).softmax(-1).to(query.dtype)
    far, near = weights.split([far.shape[-1], near.shape[-1]], -1)
    attended = (far.flatten(2, 3) @ prefix_values).unflatten(2, (roots, width))
    return attended + (near[..., None, :] @ values)[..., 0, :]


class _Recorder:
    """Stands where a cache would and keeps the layer's rotated keys and its values, with their gradients."""

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


def take_rows(states: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, R] of states [B, L, ...]: [B, R, ...]."""
    return states[torch.arange(len(states), device=states.device)[:, None], index]


def _take(states: Tensor, parents: Tensor) -> Tensor:
    """Rows `parents` [B, R, k] of states [B, R, m, H]: [B, R, k, H]."""
    if states.shape[2] == 1:
        return states.expand(-1, -1, parents.shape[2], -1)
    return states.gather(2, parents[..., None].expand(-1, -1, -1, states.shape[-1]))


def _take_path(states: Tensor, parents: Tensor) -> Tensor:
    """Paths `parents` [B, R, k] of states [B, heads, R, m, depth, head_dim]: [B, heads, R, k, depth, head_dim]."""
    index = parents[:, None, :, :, None, None]
    return states.gather(3, index.expand(-1, states.shape[1], -1, -1, *states.shape[-2:]))


def _repeat(states: Tensor, groups: int) -> Tensor:
    """Key/value heads (dimension 1) repeated for their query heads, as `repeat_kv` does."""
    return states if groups == 1 else states.repeat_interleave(groups, 1)
