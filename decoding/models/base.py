"""Passes of a causal language model: final hidden states, and logits for chosen rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from nde_talf.decoding.common.errors import ArgumentError, UserError
from nde_talf.decoding.models.branch_session import BranchSession
from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.configuration import (
    body_of,
    forget_sampling_advice,
    longest_context,
    scale_and_cap,
)
from nde_talf.decoding.models.end_tokens import end_tokens
from nde_talf.decoding.models.forward.hooks import with_features
from nde_talf.decoding.models.forward.transformers import TransformersForward, optional, windows
from nde_talf.decoding.models.lm_head import Readout
from nde_talf.decoding.models.tree_session import TreeSession


class NativePass(Protocol):
    """A forward pass over a model's own weights, such as `forward.native.NativeForward`."""

    readout: Callable[[Tensor], Tensor]
    way: str
    capped: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return states [B, n, (1 + len(features)) H], see `NativeForward.__call__`."""


class Model:
    """Wraps a transformers causal LM whose attention takes an additive mask.

    Args:
        owned: False: somebody else uses the model too, perhaps in other threads. Nothing of it
            is written to: its generation_config, its mode, the place of its weights, and whether
            they want gradients.
        products: how large matrices are multiplied on a CPU: "plain", "onednn", "packed" and so on
            (see `forward.onednn`), or "auto", the fastest by timing.
        packs: whether "auto" may choose packed ones, a copy of the weights.

    Attributes:
        vocab_size: rows of the logits; a draft has its target's (`match`).
        native: the native forward; None: passes are transformers'.
        original: the pass as transformers runs it.
        probe, noise: tokens of the checks, and how far transformers' own passes over them differ.
        chat_ends: tokens that end a text by the tokenizer and its chat template;
            `nde_talf.data.text.pair.set_ends` sets them.
        forward: which one that is and why, in words.
        form: how a tree is scored: by "masks" in one pass, or by "branches" as a batch of its
            paths, or "tokens" of them one by one.
    """

    form = "masks"
    probe: list[int]
    noise: float

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        owned: bool,
        products: str,
        packs: bool,
    ):
        if optional(model, "generation_config") is None:
            raise ArgumentError(
                f"model={type(model).__name__}: it is no language model that generates text. Load"
                " it with transformers' AutoModelForCausalLM, or give CausalModel.load its folder."
            )
        config = model.config.get_text_config()
        self.name = name
        self.module = model
        self.products, self.packs, self.owned = products, packs, owned
        if owned:
            forget_sampling_advice(model.eval().requires_grad_(False))
        self.body = body_of(model)
        self.original = TransformersForward(self.body)
        self.lm_head = model.get_output_embeddings()
        # Its type is the one computed in, also where other weights are quantised.
        embedding = cast("Tensor", model.get_input_embeddings().weight)
        self.config = config
        self.hidden_size: int = self.lm_head.weight.shape[1]
        self.layers: int = optional(config, "num_hidden_layers", 0)
        self.vocab_size = self._rows = len(self.lm_head.weight)
        self.chat_ends: frozenset[int] = frozenset()
        self._scale, self._cap = scale_and_cap(config)
        self._embedded = len(embedding)
        padding = optional(config, "pad_token_id")
        self._unknown = (
            padding
            if isinstance(padding, int) and 0 <= padding < self._embedded
            else self._embedded - 1
        )
        self.max_context = longest_context(config)
        self.windows = windows(config)
        self.device, self.dtype = embedding.device, embedding.dtype
        if self.device.type == "meta":
            raise ArgumentError(
                f"{name}: its weights are on the meta device, so it has none. Load it with"
                " from_pretrained, or give CausalModel.load its folder."
            )
        self.native: NativePass | None = None
        self._readers: dict[tuple[int, ...], Callable[..., Tensor]] = {}

    def __deepcopy__(self, memo: dict) -> "Model":
        # Never trained: copies of its users (an average of weights) share it.
        return self

    def match(self, rows: int) -> None:
        """Take over a target's vocabulary size, as its draft: logits get `rows` columns.

        For example, Qwen-2.5 0.5B has 151,936 rows and its target of 32B has 152,064, for one
        tokenizer and two amounts of padding. Rows that the model does not have get -inf, so that
        they are never drafted; surplus ones are cut. In a text, a token that it does not
        know counts as its padding token (its last token, if it has none). It is then the draft of
        targets of this size alone.
        """
        self.vocab_size = rows

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text: generation_config's, and `chat_ends`."""
        eos = self.module.generation_config.eos_token_id
        return end_tokens(eos, self.vocab_size) | self.chat_ends

    def known(self, tokens: Tensor) -> Tensor:
        """`tokens`, those that the model has no embedding for replaced by its padding token."""
        return (
            tokens
            if self.vocab_size <= self._embedded
            else torch.where(tokens < self._embedded, tokens, self._unknown)
        )

    @property
    def readout(self) -> Readout:
        """Return the readout that makes the logits.

        After `match`, weight and bias are views of the rows that model and target share.
        """
        weight, bias = self.lm_head.weight, optional(self.lm_head, "bias")
        if self.vocab_size < len(weight):
            weight, bias = (
                weight[: self.vocab_size],
                None if bias is None else bias[: self.vocab_size],
            )
        return Readout(weight, bias, self._scale, self._cap)

    def hidden(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """Hidden states [B, n, H] (after the final norm) of `tokens` [B, n] at `positions` [B, n].

        `mask` [B or 1, 1, n, m] is additive (0 or the dtype's minimum) over the last m slots, first
        the cache's and then the rows. All rows see the slots before, which
        hold the text, slot i its token i. The model's own windows are added here. None is the plain
        causal pass.
        """
        return self._run((), tokens, positions, mask, cache)

    def _run(
        self,
        features: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        # Autocast is for transformers' modules: it would mix types in native passes, which work in
        # place.
        native = None if torch.is_autocast_enabled(self.device.type) else self.native
        inputs = self.known(tokens), positions, mask, cache, self.windows
        if native:
            states = native(*inputs, features)
        elif features:
            states = with_features(self.original, features, *inputs)
        else:
            states = self.original(*inputs)
        return states.to(self.device)  # the last layer may be on another device

    def session(self, layers: Sequence[int] = (), static: Any = None) -> TreeSession:
        """Make the session of a sequence, whose states `reader(layers)` returns.

        static: shapes of its passes (`nde_talf.decoding.models.static_shapes.StaticShapes`).
        """
        reader = self.reader(layers)
        if self.form == "masks":
            make = TreeSession if static is None else static.session
            return make(reader, self.device, self.dtype, self.layers)
        if static is not None:
            raise UserError(
                f"{self.name}: static shapes need a cache of slots, and its trees are scored"
                " branch by branch. Set model.static_shapes=false."
            )
        return BranchSession(reader, self.device, self.dtype, self.form == "branches")

    def reader(self, layers: Sequence[int]) -> Callable[..., Tensor]:
        """Return `hidden`, or a function like it that adds the residual stream after some `layers`.

        Its states are [B, n, (1 + len(layers)) H], from one pass: the hidden states, then the
        residual stream after so many decoder layers, ascending (0: the embeddings). This is vLLM's
        numbering of auxiliary hidden states. Every call returns one and the same function.

        Raises:
            UserError: the model's decoder layers are not where Llama has them.
        """
        if not layers:
            return self.hidden
        blocks = optional(self.body, "layers", ())
        if len(blocks) != self.layers or not 0 <= min(layers) <= max(layers) <= self.layers:
            raise UserError(
                f"{self.name}: no features of its layers {', '.join(map(str, layers))} can be"
                f" taken: it has {self.layers}, and they have to stand in a list, as Llama's do."
                " Choose another target, or a head with draft.features=final."
            )
        return self._readers.setdefault(tuple(layers), partial(self._run, tuple(layers)))

    def parts(self, states: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Split the final hidden states from a drafter's features.

        Args:
            states: [..., (1 + len(layers)) H], returned by `reader(layers)`.
            layers: those that `reader` got.

        Returns:
            The hidden states [..., H] and the features: the layers' [..., len(layers) H], or the
            hidden states if there are no layers.
        """
        if not layers:
            return states, states
        return states[..., : self.hidden_size], states[..., self.hidden_size :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], V = `vocab_size`.

        A token that the model does not know has -inf.
        """
        read = self.native.readout if self.native else self.lm_head
        logits = read(hidden).to(self.device)
        if (self._scale, self._cap) != (1, None):
            logits = self.readout.finish(logits)
        if self.vocab_size == self._rows:
            return logits
        unknown = self.vocab_size - self._rows
        return F.pad(logits, (0, unknown), value=-torch.inf)  # cuts what is too much
