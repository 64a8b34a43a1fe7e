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

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from decoding.cache import SlotCache
from decoding.errors import UserError
from decoding.model import CausalModel

# Root mean square of a fresh head's first state: of its part from the embedding, and from a feature of size 1.
_EMBEDDING_SHARE, _FEATURE_SHARE = 0.5, 0.3

_SHARED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


@dataclass
class TreeLevel:
    """One depth d >= 1 of the trees behind R roots: k nodes each.

    tokens [B, R, k]: the node's token. parents [B, R, k]: index of its parent among the k nodes one level up (0 at
    depth 1, whose parent is the root).
    """

    tokens: Tensor
    parents: Tensor


def head_config(target: CausalModel) -> LlamaConfig:
    """The one-layer Llama config of a head for `target`. Raises UserError if the target has no Llama-like layer."""
    missing = [name for name in _SHARED_SIZES if getattr(target.config, name, None) is None]
    if missing or target.lm_head.bias is not None:
        what = f"its config has no {', '.join(missing)}" if missing else "its lm_head has a bias"
        raise UserError(f"{target.name}: {what}, so no Llama-style draft head can be built on it. Choose another target.")
    sizes = {name: getattr(target.config, name) for name in _SHARED_SIZES}
    sizes["head_dim"] = getattr(target.config, "head_dim", None) or sizes["hidden_size"] // sizes["num_attention_heads"]
    config = LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    config._attn_implementation = "sdpa"
    return config


class EagleHead(nn.Module):
    """A head for `target`, randomly initialised from torch's global generator.

    Its parameters, and so its state dict, are those of the exported file; the target's embedding and lm_head are used
    through `target`, frozen, and are no part of the module.
    """

    def __init__(self, target: CausalModel):
        super().__init__()
        self.config = head_config(target)
        self.target = target
        hidden = self.config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        layer = LlamaDecoderLayer(self.config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.rotary = LlamaRotaryEmbedding(self.config)
        self._initialise()
        self.to(target.device, target.dtype)

    def _initialise(self) -> None:
        # A head begins as a layer over the token just drawn, its embedding scaled towards the size of the features
        # (embeddings are often 10 times smaller), with some of the feature mixed in at random. Started as "the feature
        # stays as it is", it learned far more slowly and was worse still where its own features are fed back.
        hidden = self.config.hidden_size
        embedding = self.target.module.get_input_embeddings().weight
        scale = embedding.float().pow(2).mean().sqrt().clamp(min=1e-6).item()
        std = getattr(self.target.config, "initializer_range", 0.02)
        with torch.no_grad():
            for parameter in self.layers.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=std)
            self.fc.weight[:, :hidden] = _EMBEDDING_SHARE * torch.eye(hidden) / scale
            self.fc.weight[:, hidden:].normal_(std=_FEATURE_SHARE * hidden**-0.5)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding [..., H] of `tokens` [...]."""
        return self.target.module.get_input_embeddings()(tokens)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: SlotCache | None, features: Tensor
    ) -> Tensor:
        """Output features [B, n, H] of the entries (tokens [B, n], features [B, n, H]) at `positions` [B, n].

        `mask` [B or 1, 1, n, cached + n] is additive; None lets every entry see what is cached and the entries before
        it.
        """
        entries = self.fc(torch.cat([self.embed(tokens), features], -1))
        return self.layers[0](
            entries,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            position_embeddings=self.rotary(entries, positions),
        )

    def tree_features(
        self,
        tokens: Tensor,
        features: Tensor,
        roots: Tensor,
        levels: Sequence[TreeLevel],
        detach: bool = False,
    ) -> list[Tensor]:
        """Output features of a sequence and of the trees behind `roots`, as decoding would compute them branch by
        branch.

        tokens [B, L]; features [B, L, H]: the target's; roots [R]: token indices in 1..L-1, ascending; levels: depth 1,
        2, ... . Returns depth 0 at *every* entry, [B, L-1, H] (row t is f_{t+1}, the guess at token t+1), then
        [B, R, k, H] for each level. A node attends to the entries up to its root's, whose keys come from the target's
        features, and to its ancestors, whose keys come from fed-back output features: prefix and ancestor scores
        under one softmax. `detach` stops gradients at the fed-back features.
        """
        prefix = _Recorder()
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        trunk = self.forward(tokens[:, 1:], positions[None], None, prefix, features[:, :-1])
        outputs = [trunk]
        if not levels:
            return outputs

        entries = roots - 1  # the entry of root x_r is (x_r, h_{r-1})
        hidden_from = positions > entries[:, None]  # [R, L-1]
        fed = trunk[:, entries, None]  # [B, R, 1, H]
        keys = values = None  # of each node's path from depth 1 down: [B, heads, R, k, depth, head_dim]
        for depth, level in enumerate(levels, 1):
            fed = _take(fed, level.parents)
            inputs = self.fc(torch.cat([self.embed(level.tokens), fed.detach() if detach else fed], -1))
            query, key, value = self._project(inputs, (entries + depth)[:, None].expand(level.tokens.shape[1:]))
            key, value = key[..., None, :], value[..., None, :]
            if depth > 1:
                key = torch.cat([_take_path(keys, level.parents), key], -2)
                value = torch.cat([_take_path(values, level.parents), value], -2)
            keys, values = key, value
            attended = self._attend(query, prefix.keys, prefix.values, hidden_from, keys, values)
            fed = self._finish(inputs, attended)
            outputs.append(fed)
        return outputs

    def _project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, heads, R, k, head_dim], key and value [B, kv_heads, R, k, head_dim] of `inputs` [B, R, k, H] at
        `positions` [R, k], rotated."""
        attention = self.layers[0].self_attn
        roots, width = inputs.shape[1:3]
        flat = inputs.flatten(1, 2)
        query, key, value = (
            projection(flat).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(flat, positions.reshape(1, -1)))
        return tuple(states.unflatten(2, (roots, width)) for states in (query, key, value))

    def _attend(
        self, query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, hidden: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention [B, R, k, heads * head_dim] of nodes to the prefix (where `hidden` [R, L-1] is False) and to
        their own paths, one softmax over both."""
        attention = self.layers[0].self_attn
        groups = attention.num_key_value_groups
        roots, width = query.shape[2:4]
        query = query.to(prefix_values.dtype) * attention.scaling
        keys, values = (_repeat(states, groups).to(query.dtype) for states in (keys, values))
        prefix_keys, prefix_values = (repeat_kv(states, groups).to(query.dtype) for states in (prefix_keys, prefix_values))
        far = (query.flatten(2, 3) @ prefix_keys.transpose(-1, -2)).unflatten(2, (roots, width))
        far = far.masked_fill(hidden[:, None], torch.finfo(far.dtype).min)
        near = (keys @ query[..., None])[..., 0]
        weights = torch.cat([far, near], -1).softmax(-1).to(query.dtype)
        far, near = weights.split([far.shape[-1], near.shape[-1]], -1)
        attended = (far.flatten(2, 3) @ prefix_values).unflatten(2, (roots, width))
        attended = attended + (near[..., None, :] @ values)[..., 0, :]
        return attended.permute(0, 2, 3, 1, 4).flatten(3)

    def _finish(self, inputs: Tensor, attended: Tensor) -> Tensor:
        """What the decoder layer does behind its attention."""
        layer = self.layers[0]
        states = inputs + layer.self_attn.o_proj(attended)
        return states + layer.mlp(layer.post_attention_layernorm(states))


class _Recorder:
    """Stands where a cache would and keeps the layer's rotated keys and its values, with their gradients."""

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


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
