"""Causal language model as decoding sees it: final hidden states, and logits for chosen rows.

It loads a transformers model and checks whether that model can be used: it has to obey a tree mask,
and its logits have to be those of `Readout`. It knows nothing of caches' contents, trees or
sampling.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.forward.attention import OPEN
from nde_talf.decoding.forward.layer import NotNativeError
from nde_talf.decoding.forward.native import NativeForward, native_forward
from nde_talf.decoding.forward.original import TransformersForward
from nde_talf.decoding.forward.product import product
from nde_talf.decoding.names import FORWARDS
from nde_talf.decoding.readout import Readout, optional, scale_and_cap
from nde_talf.decoding.session import TreeSession
from nde_talf.decoding.windows import FULL, WINDOW_KEYS, layer_kinds, windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Largest difference of logits by rounding, as a fraction of the largest one, by dtype.
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
_HALF = 0.05
# Between the native forward and transformers', whose norms and angles are computed in float32 at
# the widest.
_SAME = {torch.float64: 1e-4, torch.float32: 1e-4}
_FAR = 600
"""A position at which the native forward is compared with transformers', beside those from 0 on."""
_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError)
"""What a pass raises that a model cannot run."""
_SLOTS = 1024  # of trees in flight, beyond the text


class CausalModel:
    """Wraps a transformers causal LM whose attention takes an additive mask.

    Args:
        forward: "native": passes are those of `NativeForward`, which has to know the model's
            family. "transformers": passes are transformers'. "auto": native ones where that is
            possible and their logits are transformers'.
        owned: False: the model is somebody else's, who goes on using it. Its generation_config, its
            mode and whether its weights want gradients stay as they are.

    Attributes:
        vocab_size: rows of the logits; of a draft, those of its target (`match`).
        native: the native forward; None: passes are transformers'.
        forward: which one that is and why, in words.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        name: str = "model",
        forward: str = "auto",
        owned: bool = True,
    ):
        if forward not in FORWARDS:
            raise UserError(f"{name}: forward={forward}; choose one of {', '.join(FORWARDS)}.")
        config = model.config.get_text_config()
        if reason := cannot_take_a_tree(model):
            raise UserError(
                f"{name}: {reason}, so one pass cannot hold a tree. Choose another model."
            )
        self.name = name
        self.module = model
        if owned:
            _forget_sampling_advice(model.eval().requires_grad_(False))
        self.body = body_of(model)
        self.lm_head = model.get_output_embeddings()
        # Of the type that is computed in, also where other weights are quantised.
        embedding = cast("Tensor", model.get_input_embeddings().weight)
        self.config = config
        self.hidden_size: int = self.lm_head.weight.shape[1]
        self.layers: int = config.num_hidden_layers
        self.vocab_size = self._rows = len(self.lm_head.weight)
        self._scale, self._cap = scale_and_cap(config)
        self._embedded = len(embedding)
        padding = optional(config, "pad_token_id")
        self._unknown = (
            padding
            if isinstance(padding, int) and 0 <= padding < self._embedded
            else self._embedded - 1
        )
        self.max_context = _context(config)
        self.windows = windows(config)
        self.device, self.dtype = embedding.device, embedding.dtype
        self.original = TransformersForward(self.body)
        self.native: NativeForward | None = None
        self._readers: dict[tuple[int, ...], Callable[..., Tensor]] = {}
        self.forward = self._choose(forward)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str = "cpu",
        dtype: str = "float32",
        name: str = "model",
        forward: str = "auto",
        device_map: str | None = None,
    ) -> "CausalModel":
        """Load from a folder or hub name.

        device_map: "auto" lets accelerate lay the layers over all GPUs, for a model that one does
        not hold; passes are transformers' there. Raises UserError naming `folder` if there is no
        usable model or not all of one: see `load_module`.
        """
        from nde_talf.decoding.loading import load_module

        return cls(load_module(folder, device, dtype, name, device_map), name, forward)

    def __deepcopy__(self, memo: dict) -> "CausalModel":
        # never trained, so what uses it and is copied (an average of weights) goes on using this
        # one
        return self

    def to(self, device: torch.device) -> None:
        """Move the model to `device`.

        Quantised weights stay where they were loaded: raises UserError for another device.
        """
        if optional(self.module, "is_quantized", False):
            asked = torch.device(device)
            if asked.type != self.device.type or asked.index not in (None, self.device.index):
                raise UserError(
                    f"{self.name}: quantised weights cannot be moved to {device}; load them there"
                    " (model.device)."
                )
            return
        self.module.to(device)  # type: ignore[arg-type]
        self.device = cast("Tensor", self.module.get_input_embeddings().weight).device

    def match(self, rows: int) -> None:
        """Take over a target's vocabulary size, as its draft: logits get `rows` columns.

        For example, Qwen-2.5 0.5B has 151,936 rows and its target of 32B has 152,064, for one
        tokenizer and two amounts of padding. Rows that the model does not have get -inf, so that
        they are never drafted; surplus ones are not computed. In a text, a token that it does not
        know counts as its padding token (its last token, if it has none).
        """
        self.vocab_size = rows

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

        `mask` [B or 1, 1, n, m] is additive (0 or the dtype's minimum): what may be seen at all of
        the last m slots, those of the cache and then the rows. All rows see the slots before, which
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
        states = (native or self.original)(
            self.known(tokens), positions, mask, cache, self.windows, features
        )
        return states.to(self.device)  # the last layer may lie on another device

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
        if self.vocab_size == self._rows:
            if (
                self.native and type(self.lm_head) is nn.Linear
            ):  # without the calls that a module makes
                weights = self.lm_head._parameters
                logits = product(hidden, cast("Tensor", weights["weight"]), weights["bias"])
            else:
                logits = self.lm_head(hidden).to(self.device)
            return logits if (self._scale, self._cap) == (1, None) else self.readout.finish(logits)
        readout = self.readout
        if self.vocab_size < self._rows:
            return readout(hidden)
        logits = hidden.new_empty(hidden.shape[:-1].numel(), self.vocab_size)
        products = torch.mm(
            hidden.reshape(len(logits), -1), readout.weight.T, out=logits[:, : self._rows]
        )
        readout.finish(products if readout.bias is None else products.add_(readout.bias))
        logits[:, self._rows :] = -torch.inf
        return logits.view(*hidden.shape[:-1], -1)

    def _choose(self, forward: str) -> str:
        """Set `native` if `forward` asks for it and its logits agree with transformers'.

        If it is not used, transformers' forward pass is checked. Returns which forward pass it is,
        and why.

        Raises:
            UserError: neither can be used.
        """
        reason = ""
        if forward != "transformers":
            try:
                self.native = native_forward(self.module, self.body, self.config)
                bound = _SAME.get(self.dtype, _HALF)
                difference = max(
                    self._head_difference(), self._tree_difference(), self._far_difference()
                )
                if difference <= bound:
                    kind = self.config.model_type
                    return (
                        f"native ({kind}; its logits are transformers' to"
                        f" {max(difference, 1e-9):.0e} of the largest)"
                    )
                reason = (
                    f"its logits differ from transformers' by {difference:.1g} of the largest, and"
                    f" {bound:g} is allowed"
                )
            except NotNativeError as error:
                reason = str(error)
            except _FAULTS as error:
                reason = f"it failed ({first_line(error)})"
            self.native = None
        if forward == "native":
            raise UserError(
                f"{self.name}: model.forward=native is not possible: {reason}. Set"
                " model.forward=auto, which takes transformers' forward pass for such a model."
            )
        self._check_original()
        return f"transformers' (no native one: {reason})" if reason else "transformers'"

    def _check_original(self) -> None:
        try:
            if not (difference := self._head_difference()) <= max(
                1e-3, 4 * torch.finfo(self.dtype).eps
            ):
                raise UserError(
                    f"{self.name}: its logits differ by up to {difference:.2g} from those that its"
                    f" lm_head and its configuration (scale {self._scale:g}, soft cap {self._cap})"
                    " give for its last hidden state, as a fraction of the largest. Labels,"
                    " features and draft heads rely on them. Choose another model."
                )
            if not (difference := self._tree_difference()) <= _CLOSE.get(self.dtype, _HALF):
                raise UserError(
                    f"{self.name}: in a pass over a tree its logits differ by {difference:.2g} from"
                    " those of each branch alone, as a fraction of the largest: its attention does"
                    " not follow the mask and the positions that it is given. Choose another"
                    " model."
                )
        except _FAULTS as error:
            raise UserError(
                f"{self.name}: its attention does not take a mask of one row a token"
                f" ({first_line(error)}), so one pass cannot hold a tree. Choose another model."
            ) from error

    @torch.no_grad()
    def _head_difference(self) -> float:
        """Return the difference between the module's logits and those of `hidden` and `logits`.

        It is the largest difference, divided by the largest logit.
        """
        probe = torch.arange(4, device=self.device)[None]
        full = self.module(input_ids=probe % self.vocab_size, use_cache=False).logits
        return _apart(self.logits(self.hidden(probe % self.vocab_size, probe, None, None)), full)

    @torch.no_grad()
    def _tree_difference(self) -> float:
        """Return the difference between two branches in one pass and each alone in transformers'.

        The branches follow a prefix; windows of 3 tokens are included. On a GPU the prefix is so
        long that attention goes in two parts there.
        """
        tokens = [token % self.vocab_size for token in range(1, 8)]
        longer = min(OPEN, self.max_context - 8) if self.device.type == "cuda" else 0
        before = [token % self.vocab_size for token in range(longer)]
        parents = [-1, 0, 0, 1, 2]  # rows 1 and 2 are siblings, 3 and 4 their children
        session = TreeSession(self.hidden, self.device, self.dtype, self.layers)
        sizes = {key: size for key in WINDOW_KEYS if (size := optional(self.config, key))}
        try:
            for key in sizes:
                setattr(self.config, key, 3)
            self.windows = windows(self.config)
            session.append([*before, *tokens[:2]])
            tree = self.logits(session.grow(tokens[2:], parents))
            session.commit([0, 2, 4])
            after = self.logits(session.append(tokens[:1]))[-1]
            before += tokens[:3]
            alone = [
                self._alone([*before, *branch])
                for branch in (tokens[3:6:2], tokens[4:7:2], [*tokens[4:7:2], tokens[0]])
            ]
        finally:
            for key, size in sizes.items():
                setattr(self.config, key, size)
            self.windows = windows(self.config)
        return _apart(torch.stack([tree[3], tree[4], after]), torch.stack(alone))

    @torch.no_grad()
    def _far_difference(self) -> float:
        """Return the difference between `hidden` and transformers' pass at far positions.

        The far rows look back at the first ones.
        """
        far = min(_FAR, self.max_context - 3)
        positions = torch.tensor([[0, 1, 2, far, far + 1, far + 2]], device=self.device)
        tokens, blocked = (positions + 1) % self.vocab_size, torch.finfo(self.dtype).min
        mask = torch.full((1, 1, 6, 6), blocked, dtype=self.dtype, device=self.device).triu_(1)
        passes = self.hidden, partial(self.original, windows=self.windows)
        ours, theirs = (self.logits(run(tokens, positions, mask, None)) for run in passes)
        return _apart(ours, theirs)

    def _alone(self, tokens: list[int]) -> Tensor:
        """Logits [V] after `tokens` in a plain pass."""
        return self.module(
            input_ids=torch.tensor([tokens], device=self.device), use_cache=False
        ).logits[0, -1]


def body_of(model: "PreTrainedModel") -> nn.Module:
    """Return the module that makes hidden states of tokens.

    In a model with a part for images, say, it is the part that reads text.
    """
    body = cast("nn.Module", model.get_decoder())
    return cast("nn.Module", body.model) if body is model else body


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of logits, as a fraction of the largest; NaN where one is no number."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def cannot_take_a_tree(model: "PreTrainedModel") -> str | None:
    """Tell why a transformers model cannot run several branches in one pass; None if it may.

    Only its configuration is read.
    """
    config = model.config.get_text_config()
    kinds = layer_kinds(config)
    if optional(model, "_is_stateful", False) or kinds & {
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        "recurrent",
    }:
        return "it keeps a recurrent state, which follows one sequence"
    if unknown := kinds - {FULL, "sliding_attention", "chunked_attention"}:
        return (
            f"its layers use {', '.join(sorted(unknown))}, of which it is not known what a tree's"
            " rows see"
        )
    if "local" in optional(config, "attention_layers", ()):
        return (
            "its local layers count slots of the cache, not positions, which a tree's rows would"
            " shift"
        )
    if optional(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "it has ALiBi instead of positions, counted from a mask that knows one sequence only"
    if (attention := optional(config, "_attn_implementation")) not in (None, "sdpa", "eager"):
        return (
            f"its attention is {attention}, which takes no mask of one row a token (load it with"
            " attn_implementation='sdpa')"
        )
    return None


def _context(config: "PretrainedConfig") -> int:
    """Return the number of positions at which logits depend only on the tokens before.

    At later positions they would depend on the pass too.
    """
    context: int = optional(config, "max_position_embeddings", 1 << 30)
    rope = optional(config, "rope_parameters") or {}
    if (
        rope.get("rope_type") == "longrope"
    ):  # all angles of a pass change once it reaches beyond these positions
        context = min(context, rope["original_max_position_embeddings"])
    if (
        config.model_type == "llama4_text" and config.attn_temperature_tuning
    ):  # from here on it counts slots, not positions
        context = min(context, config.floor_scale - _SLOTS)
    return context


def _forget_sampling_advice(module: "PreTrainedModel") -> None:
    """Drop the advice of a model's generation_config.json except its special tokens.

    The advice is about temperature, repetition penalty, min-p and the like. Sampling here follows
    the setting asked for, and nothing else.
    """
    from transformers import GenerationConfig

    advice = module.generation_config
    kept = {
        name: getattr(advice, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    module.generation_config = GenerationConfig(**kept)


def check_pair(target: CausalModel, draft: CausalModel) -> None:
    """Make `draft` speak the rows of `target`.

    Whether their tokenizers agree is for the caller to compare.
    """
    draft.match(target.vocab_size)
