"""A forward pass of our own, in the manner of gpt-fast, for a transformers model of a family that it knows.

It takes the model's weights without a second copy and does what transformers does with far fewer calls: fused matrices, tables
of rotary positions made once, one call a norm, and attention to the text without a mask. `CausalModel` compares its logits
with transformers' before it is used.
"""

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decoding.cache import KVCache
from decoding.forward.attention import seen_in
from decoding.forward.layer import Angles, DecoderLayer, Norm, NotNative
from decoding.windows import Window, layer_kinds

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_STEADY_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not depend on how long a pass is."""
_FIRST_POSITIONS = 1024


class Family(NamedTuple):
    """What a family's configuration and modules do not say. added: norms multiply by 1 + w. capped: attention scores are
    capped where the configuration has a cap."""

    added: bool = False
    capped: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma2": Family(added=True, capped=True),
    "gemma3_text": Family(added=True),
}


class RotaryTable:
    """cos and sin at positions 0, 1, ..., as transformers computes them (in float32): [positions, 2 D]. With a minus sign in
    the first half of sin (`layer.rotate`).

    Args:
        module: transformers' rotary module.
        kind: of the layers, where the module has angles for each.
        like: a tensor of the states' type and device.
    """

    def __init__(self, module: Any, kind: str | None, like: Tensor):
        self.module, self.kind, self.like = module, kind, like
        self.table = like[:0]
        self.reach(_FIRST_POSITIONS)

    def reach(self, positions: int) -> None:
        """Make the table longer where it ends before so many positions."""
        if positions > len(self.table):
            rows = torch.arange(1 << (positions - 1).bit_length(), device=self.like.device)[None]
            cos, sin = self.module(self.like, rows) if self.kind is None else self.module(self.like, rows, self.kind)
            half = sin.shape[-1] // 2
            self.table = torch.cat([cos, -sin[..., :half], sin[..., half:]], -1)[0]

    def at(self, positions: Tensor) -> Angles:
        """Angles at `positions` [B, n] for `layer.rotate`."""
        cos, sin = F.embedding(positions, self.table).unsqueeze(2).chunk(2, -1)
        return cos, sin


class NativeForward:
    """The pass of a transformers model's body: from tokens to hidden states after the final norm.

    Weights may be changed in place at any time. Where the model's modules or weights were replaced or moved, the next sequence
    begins with the new ones.

    Raises:
        NotNative: the model has something that this pass does not do; also where it was changed so.
    """

    def __init__(self, module: "PreTrainedModel", body: nn.Module, config: "PretrainedConfig"):
        if reason := _foreign(module, config):
            raise NotNative(reason)
        self.body, self.config, self.family = cast("Any", body), config, FAMILIES[config.model_type]
        self._lock = Lock()
        self._build()

    def _build(self) -> None:
        body, config = self.body, self.config
        embedding = body.embed_tokens
        self.embedding: Tensor = embedding.weight.detach()
        scale = getattr(embedding, "embed_scale", None)
        self.embedding_scale = None if scale is None else float(scale.to(self.embedding.dtype))
        listed = getattr(config, "layer_types", None)
        kinds = list(listed) if listed else [next(iter(layer_kinds(config)))] * len(body.layers)
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        cap = getattr(config, "attn_logit_softcapping", None) if self.family.capped else None
        self.groups, self.capped = heads // shared, cap is not None
        self.layers = [
            DecoderLayer(block, heads, shared, self.family.added, kind, cap)
            for block, kind in zip(body.layers, kinds, strict=True)
        ]
        self.norm = Norm(body.norm, self.family.added)
        by_kind = isinstance(body.rotary_emb.rope_type, dict)
        each = [(kind, RotaryTable(body.rotary_emb, kind, self.embedding[:1])) for kind in set(kinds)] if by_kind else []
        self.tables = dict(each) if by_kind else dict.fromkeys(kinds, RotaryTable(body.rotary_emb, None, self.embedding[:1]))
        if self.tables[kinds[0]].table.shape[-1] != 2 * self.layers[0].size:
            raise NotNative("it rotates a part of each head")
        copies = [pair for part in (*self.layers, self.norm) for pair in part.copies]
        self._copied, self._sources = [copy for copy, _ in copies], [source for _, source in copies]
        self._modules = list(body.modules())
        self._where = self._addresses()

    def _addresses(self) -> list[int]:
        """Which modules there are, and where their parameters lie in memory."""
        found = []
        for module in self._modules:
            found += map(id, module._modules.values())
            found += [own.data_ptr() for own in module._parameters.values() if own is not None]
        return found

    def _refresh(self) -> None:
        """Take over what was done to the model's weights since the last sequence. Views show changes in place by themselves."""
        with self._lock:
            if self._addresses() != self._where:
                self._build()
            if self._copied:
                added = self.family.added
                fresh = torch._foreach_add([own.float() for own in self._sources], 1) if added else self._sources
                torch._foreach_copy_(self._copied, fresh)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | None,
        windows: dict[str, Window | None],
        features: Sequence[int] = (),
    ) -> Tensor:
        """See `CausalModel.hidden`; [B, n, (1 + len(features)) H].

        Args:
            tokens: [B, n], all known to the model.
            positions: [B or 1, n].
            windows: of the layers, by kind.
            features: after how many layers the residual stream is wanted too, see `CausalModel.reader`.
        """
        batch, count = tokens.shape
        slots = count if cache is None else cache.columns(count)
        if slots == count:
            self._refresh()
        rows = positions.expand(batch, -1)
        columns = (rows if cache is None else cache.place(rows)) if windows else None
        reach = slots if cache is None or cache.target is None else cache.target.capacity
        seen, angles = {}, {}
        for kind, table in self.tables.items():
            seen[kind] = seen_in(
                windows.get(kind), mask, rows, columns, slots - count, self.embedding.dtype, self.groups, self.capped
            )
            table.reach(reach)
            angles[kind] = table.at(positions)
        states = F.embedding(tokens, self.embedding).view(batch * count, -1)
        if self.embedding_scale is not None:
            states *= self.embedding_scale
        found = [states.clone()] if 0 in features else []
        for index, layer in enumerate(self.layers):
            write = _nowhere if cache is None else cache.layer(index).update
            states = layer.run(states, batch, angles[layer.kind], seen[layer.kind], write)
            if index + 1 in features:
                found.append(states.clone())
        hidden = self.norm(states)
        return (torch.cat([hidden, *found], -1) if found else hidden).view(batch, count, -1)


def _nowhere(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values


def _foreign(module: "PreTrainedModel", config: "PretrainedConfig") -> str | None:
    """Why a model has no native pass, as far as its configuration says; None if it may."""
    if config.model_type not in FAMILIES:
        return f"there is none for models of type {config.model_type}"
    if hasattr(module, "sharded_by"):
        return "its weights are divided among processes"
    if getattr(module, "is_quantized", False):
        return "its weights are quantised"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead"
    ropes = config.rope_parameters or {}
    parts = [own for own in ropes.values() if isinstance(own, dict)] or [ropes]
    for rope in parts:
        if (kind := rope.get("rope_type", "default")) not in _STEADY_ROPES:
            return f"its rotary positions are of type {kind}"
    return None
