"""EAGLE's draft head: one decoder layer over (next token, the target's feature).

The target's readout reads it out.

Entry t of a sequence is the pair (x_{t+1}, h_t), where h_t is the target's feature at token t. The
head turns it into f_{t+1}, a guess of h_{t+1}, and the target's readout makes its distribution of
x_{t+2} of it. After drafted tokens, where the target has not been, f takes the place of h. The head
runs in two ways with the same numbers: `forward` grows a tree through a cache, as decoding does;
`tree_attention.tree_features` runs full trees after every root of a sequence, as training does.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.forward.native import FusedPass
from nde_talf.decoding.models.forward.transformers import wide_mask
from nde_talf.decoding.models.lm_head import Readout
from nde_talf.draft_training.model.families import family_of, layer_config, rotary_of
from nde_talf.draft_training.training_settings import FAMILY

# Root mean square, in a fresh head's first state, of the part from the embedding and of the part
# from a feature of size 1.
_FROM_EMBEDDING, _FROM_FEATURE = 0.5, 0.3


class EagleHead(nn.Module):
    """A head for `target`, randomly initialised from torch's global generator.

    Its state dict is the content of the exported file. The target's embedding and lm_head are used
    through `target`, frozen, and are no part of the module.

    Args:
        layer: "family" for a decoder layer of the target's family, "llama" for a Llama layer beside
            any target.
        dtype: of its weights; None: the target's. Training takes float32, also beside a target in
            bfloat16: an update of 3e-4 of a weight of size 1 is lost in bfloat16.
        sizes: fields of the layer's configuration that are not the target's, as published heads
            have them; `fc_bias` too.
        vocabulary: see below; it may be set later where the target's readout is used.

    Attributes:
        feature_layers: layers of the target whose features the head takes (`CausalModel.reader`);
            empty: after the final norm.
        norms: some of `NORMS`.
        vocabulary: ids [D] of the tokens it can draft, ascending; None: all.
        native: the native pass, for decoding; None: transformers' layer is run.
        trained_in: Lightning's name of the precision of its training; None where it is not known.

    Raises:
        UserError: no head can be built on the target.
    """

    kind = "eagle"
    trained_in: str | None = None
    feature_layers: tuple[int, ...] = ()
    norms: tuple[str, ...] = ()
    vocabulary: Tensor | None
    native: FusedPass | None = None

    def __init__(
        self,
        target: CausalModel,
        layer: str = FAMILY,
        dtype: torch.dtype | None = None,
        sizes: dict[str, Any] | None = None,
        vocabulary: Tensor | None = None,
    ):
        super().__init__()
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.family = family_of(target, layer)
        self.config = layer_config(target, self.family)
        known = self.config.to_dict()
        self.other_sizes = {n: size for n, size in (sizes or {}).items() if size != known.get(n)}
        for name, size in self.other_sizes.items():
            setattr(self.config, name, size)
        self.target = target
        self._build(self.config.hidden_size, self.family.layer(self.config, 0))
        self.rotary, self.angles = rotary_of(self.family, self.config)
        self._initialise()
        self.to(target.device, dtype or target.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EagleHead":
        """Cast and move the module, but only move the rotary tables.

        In bfloat16 the angles at position 2,048 would be off by 0.24 on average; the target and
        vLLM keep their tables in float32.
        """
        tables = dict(self.rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, table in tables.items():
            setattr(self.rotary, name, table.to(self.device))
        return self

    def _build(self, hidden: int, decoder: nn.Module) -> None:
        self.fc = nn.Linear(2 * hidden, hidden, bias=self.other_sizes.get("fc_bias", False))
        decoder.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([decoder])

    def _initialise(self) -> None:
        # A fresh head reads the token just drawn, its embedding scaled to the size of the features
        # (embeddings are often 10 times smaller), with some of the feature mixed in at random.
        # Started as the identity on features, it learned far more slowly, and was worse still on
        # its own fed-back features.
        hidden = self.config.hidden_size
        # Row by row: a float32 copy of a large matrix may not fit beside its model.
        size = self._embedding.norm(dim=1).float().norm() / self._embedding.numel() ** 0.5
        scale = size.clamp(min=1e-6).item()
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=self._spread)
                elif name.endswith("bias"):
                    parameter.zero_()
            self.fc.weight[:, :hidden] = _FROM_EMBEDDING * torch.eye(hidden) / scale
            self.fc.weight[:, hidden:].normal_(std=_FROM_FEATURE * hidden**-0.5)

    @property
    def device(self) -> torch.device:
        """Device of its weights."""
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""
        return self.fc.weight.dtype

    @property
    def _spread(self) -> float:
        """Standard deviation of the target's own initial weights."""
        return self.target.config.to_dict().get("initializer_range", 0.02)

    @property
    def _embedding(self) -> Tensor:
        return cast("Tensor", self.target.module.get_input_embeddings().weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up `tokens` [...] in the target's embedding matrix: rows [..., H].

        Gemma's models scale these rows. Here they are not scaled: fc can hold any factor, and other
        engines share the matrix alone.
        """
        return F.embedding(self.target.known(tokens), self._embedding)

    @property
    def own_matrix(self) -> Tensor | None:
        """Its own lm_head, [V, H] or [D, H]; None where the target's readout is used."""
        return None

    def output(self, states: Tensor) -> Tensor:
        """Turn the layer's states [..., H] into output features; the identity here."""
        return states

    def read(self, outputs: Tensor) -> Tensor:
        """Turn output features [..., H] into the lm_head's input [..., H]; the identity here."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [..., V]: minus infinity for tokens that cannot be drafted."""
        logits = self.drafted_logits(outputs)
        if self.vocabulary is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.target.vocab_size), -torch.inf)
        return everything.index_copy_(-1, self.vocabulary, logits)

    def drafted_logits(self, outputs: Tensor) -> Tensor:
        """Return logits [..., D] of the tokens in `vocabulary`, in the target's dtype."""
        read = self.target.logits if self.vocabulary is None else self._rows
        return read(self.read(outputs).to(self.target.dtype))

    @cached_property
    def _rows(self) -> Readout:
        """The target's readout of the tokens in `vocabulary`."""
        whole = self.target.readout
        return replace(whole, weight=whole.weight.detach()[self.vocabulary])

    def combine(self, features: Tensor) -> Tensor:
        """Turn the target's features [..., W] into an entry's feature [..., H]; the identity here.

        After drafted tokens the head's output features take its place.
        """
        return features

    def file_weights(self) -> dict[str, Tensor]:
        """Return the weights by name, as an exported file holds them."""
        return self.state_dict()

    def load_file_weights(self, weights: dict[str, Tensor]) -> None:
        """Load the result of `file_weights`."""
        self.load_state_dict(weights)

    def entries(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention, and the residual it is added to, at (tokens, features)."""
        entries = self.fc(torch.cat([self.embed(tokens), features], -1).to(self.dtype))
        return entries, entries

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | None,
        features: Tensor,
    ) -> Tensor:
        """Return output features [B, n, H] of n entries, as decoding runs them.

        Args:
            tokens: [B, n].
            positions: [B, n].
            mask: additive, [B or 1, 1, n, m], over the last m slots of the cache and the entries;
                all earlier slots are seen. None: each entry sees the cache and earlier entries.
            cache: of earlier entries; these are appended.
            features: the combined features of the entries, [B, n, H].
        """
        if isinstance(cache, KVCache):  # as in decoding
            if self.native is not None and not self.fc.weight.requires_grad:
                return self.native(tokens, positions, mask, cache, features)
            mask = mask if mask is None else wide_mask(mask, cache.columns(tokens.shape[1]))
        entries, residual = self.entries(tokens, features)
        attended, _ = self.layers[0].self_attn(
            entries, self.angles(residual, positions), mask, cache, position_ids=positions
        )
        return self.finish(residual, attended)

    def finish(self, inputs: Tensor, attended: Tensor) -> Tensor:
        """Run the decoder layer after its attention, and `output`."""
        layer = self.layers[0]
        if not self.family.sandwich:
            states = inputs + attended
            return self.output(states + layer.mlp(layer.post_attention_layernorm(states)))
        states = inputs + layer.post_attention_layernorm(attended)
        wide = layer.mlp(layer.pre_feedforward_layernorm(states))
        return self.output(states + layer.post_feedforward_layernorm(wide))
