"""Native forward pass, in the manner of gpt-fast, for transformers models of known families.

It takes the model's weights without a second copy and does what transformers does with far fewer
calls: fused matrices (of a model that is ours), tables of rotary positions made once, one call a
norm, and attention to the text without a mask. `CausalModel` compares its logits with
transformers' before it is used.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.forward.attention import seen_in
from nde_talf.decoding.models.forward.fused_weights import FusedPart, NotNativeError
from nde_talf.decoding.models.forward.layer import DecoderLayer, Norm
from nde_talf.decoding.models.forward.onednn import linear
from nde_talf.decoding.models.forward.rotary import RotaryTable
from nde_talf.decoding.models.forward.transformers import layer_kinds, optional
from nde_talf.decoding.models.forward.windows import Window
from nde_talf.decoding.registry import family


class FusedPass:
    """A pass over `modules`, with weights that are fused.

    Weights may be changed in place at any time: fused ones are views, and the few that are copies
    (`Norm.copies`) are taken anew at the start of every sequence. Where parameters or modules were
    replaced or moved by then, or samples of packed matrices differ, all are fused again. So a
    sequence never begins with older weights.
    """

    added: bool
    """Norms multiply by 1 + w."""
    tables: dict[str, RotaryTable]
    """Rotary positions, by kind of layer."""

    def __init__(self, *modules: nn.Module):
        self._roots, self._lock = modules, Lock()  # threads may start sequences at the same time
        self._fuse()

    def _parts(self) -> Sequence[FusedPart]:
        """Fuse the weights and make `tables`. Returns what holds the fused weights."""
        raise NotImplementedError

    def _fuse(self) -> None:
        inside = next(self._roots[0].parameters()).is_inference()
        with torch.inference_mode(inside), torch.no_grad():
            parts = self._parts()
        self._copies = [pair for part in parts for pair in part.copies]
        self.tensors = [tensor for part in parts for tensor in part.tensors]
        self._samples = [sample for part in parts for sample in part.samples]
        torch.cuda.empty_cache()  # what the parts took is in pieces too small for what is fused
        self._modules = [module for root in self._roots for module in root.modules()]
        self._seen = self._state()

    def _state(self) -> list[float]:
        """List which modules there are, their parameters' addresses, and samples of packed ones."""
        state = torch.cat(self._samples).tolist() if self._samples else []
        for module in self._modules:
            parameters = [each for each in module._parameters.values() if each is not None]
            state += [*map(id, module._modules.values()), *(each.data_ptr() for each in parameters)]
        return state

    def begin(self, cache: KVCache | None) -> None:
        """Take over what was done to the weights since the last sequence, before the first pass.

        For graphs over a cache of fixed capacity, make the tables long enough, and say that weights
        stay where they are: CUDA graphs copy all else.
        """
        with self._lock, torch.inference_mode():  # which may write to any tensor
            if self._state() != self._seen:
                try:
                    self._fuse()
                except NotNativeError as error:
                    raise UserError(
                        f"{type(self._roots[0]).__name__}: it was changed since it was loaded, and"
                        f" has no native forward pass any more: {error}. Make a CausalModel of it"
                        " again."
                    ) from error
            else:
                for copy, source in self._copies:
                    copy.copy_(source.float() + 1 if self.added else source)
            if cache is not None and cache.capacity is not None:
                for table in self.tables.values():
                    table.reach(cache.capacity)
                for tensor in [*self.tensors, *(table.table for table in self.tables.values())]:
                    torch._dynamo.mark_static_address(tensor)


@family("llama")
@family("mistral")
@family("qwen2")
@family("qwen3")
class NativeForward(FusedPass):
    """The pass of a transformers model's body: from tokens to hidden states after the final norm.

    A family that differs in what its configuration and modules do not say is a subclass.

    Attributes:
        added: norms multiply by 1 + w.

    Raises:
        NotNativeError: the model has something that this pass does not do, or was given it later.
    """

    added = False

    def __init__(self, body: nn.Module, lm_head: nn.Module, config: Any, way: str, owned: bool):
        self.body: Any = body
        self.config, self.way, self.lm_head = config, way, lm_head
        self.product = partial(linear, way=way, moves=owned)
        super().__init__(body, lm_head)

    def _parts(self) -> Sequence[FusedPart]:
        body, config = self.body, self.config
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        scale = optional(body.embed_tokens, "embed_scale")
        self.embedding_scale = None if scale is None else float(scale.to(self.embedding.dtype))
        listed = optional(config, "layer_types")
        kinds = list(listed) if listed else [next(iter(layer_kinds(config)))] * len(body.layers)
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        cap = optional(config, "attn_logit_softcapping")
        self.groups, self.capped = heads // shared, cap is not None
        each = zip(body.layers, kinds, strict=True)
        self.layers = [
            DecoderLayer(block, heads, shared, self.added, kind, cap, self.product)
            for block, kind in each
        ]
        self.norm = Norm(body.norm, self.added)
        rotary, like = body.rotary_emb, self.embedding[:1]
        if isinstance(rotary.rope_type, dict):
            self.tables = {kind: RotaryTable(rotary, kind, like) for kind in dict.fromkeys(kinds)}
        else:
            self.tables = dict.fromkeys(kinds, RotaryTable(rotary, None, like))
        if self.tables[kinds[0]].table.shape[-1] != 2 * self.layers[0].size:
            raise NotNativeError("it rotates a part of each head")
        embedding = FusedPart()
        embedding.tensors = [self.embedding]
        parts = [embedding, self.norm, *(part for layer in self.layers for part in layer.parts)]
        self.readout: Callable[[Tensor], Tensor] = self.lm_head
        if type(self.lm_head) is nn.Linear:
            self.readout = readout = self.product([self.lm_head])
            parts.append(readout)
        return parts

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | None,
        windows: dict[str, Window | None],
        features: Sequence[int] = (),
    ) -> Tensor:
        """Run the model as `CausalModel.hidden` does; return states [B, n, (1 + len(features)) H].

        Args:
            tokens: [B, n], all known to the model.
            positions: [B or 1, n].
            mask: additive, see `seen_in`; None: rows see the text and the rows up to themselves.
            cache: takes keys and values; None keeps nothing.
            windows: of the layers, by kind.
            features: numbers of layers after which the residual stream is returned too, see
                `CausalModel.reader`.
        """
        batch, count = tokens.shape
        slots = count if cache is None else cache.columns(count)
        if slots == count:
            self.begin(cache)
        rows = positions.expand(batch, -1)
        columns = (rows if cache is None else cache.place(rows)) if windows else None
        seen, angles = {}, {}
        for kind, table in self.tables.items():
            seen[kind] = seen_in(
                windows.get(kind),
                mask,
                rows,
                columns,
                slots - count,
                self.embedding.dtype,
                self.groups,
                self.capped,
            )
            table.reach(slots)
            angles[kind] = table.at(positions)
        states = torch.embedding(self.embedding, tokens).view(batch * count, -1)
        if self.embedding_scale is not None:
            states *= self.embedding_scale
        streams = [states] if 0 in features else []
        for index, layer in enumerate(self.layers):
            inputs, kind = layer.before_attention(states), layer.kind
            attended = layer.attend(inputs, batch, angles[kind], seen[kind], cache, index)
            states = layer.finish(states, attended)
            if index + 1 in features:
                streams.append(states)
        hidden = self.norm(states)
        return (torch.cat([hidden, *streams], -1) if streams else hidden).view(batch, count, -1)


@family("gemma2")
@family("gemma3_text")
class GemmaForward(NativeForward):
    """Norms multiply by 1 + w."""

    added = True
