"""Checks that a model can be decoded with: it obeys a tree mask, and its logits are its readout's.

Before a native forward is used, its logits are compared with transformers'.
"""

from copy import copy, deepcopy
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError, first_line, memory_is_short
from nde_talf.decoding.common.tensors import LARGEST
from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.branch_session import BranchForward
from nde_talf.decoding.models.configuration import body_of
from nde_talf.decoding.models.forward import fused_weights
from nde_talf.decoding.models.forward.attention import OPEN
from nde_talf.decoding.models.forward.cpu_products import fastest
from nde_talf.decoding.models.forward.fused_weights import NotNativeError
from nde_talf.decoding.models.forward.native import NativeForward
from nde_talf.decoding.models.forward.transformers import (
    FULL,
    WINDOW_KEYS,
    layer_kinds,
    optional,
    windows,
)
from nde_talf.decoding.registry import FAMILIES, FORWARDS

HALF = 0.05
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of logits by rounding, as a fraction of the largest one, by dtype."""
_ROUNDING, _AS_EXACT = 1e-5, 4
"""Difference of logits that any chunk may have, and how many times a single token's."""
# Between the native forward and transformers', whose norms and angles are computed in float32 at
# the widest.
SAME = {torch.float64: 1e-4, torch.float32: 1e-4}
_NOISE, _AT_MOST = 3, 4
"""Factors: on the difference between transformers' own passes, for the bound of logits, and on the
bound without it, beyond which a fault would pass for rounding.
"""
_FAR = 600
"""A position at which the native forward is compared with transformers', beside those from 0 on."""
FAULTS = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError),
    *(ImportError, AssertionError),
)
"""Errors of a pass that a model cannot run."""
_BEFORE = 6
"""Tokens before the tree of a check, more than a convolution of a state looks back."""
_STRETCHES = (1 / 2, 1 / 3, 2 / 3, 1 / 4, 3 / 4)
"""Places in the vocabulary of the tokens that checks run.

At its ends are special and unused tokens and bytes, which are often untrained: on them rounding
grows until passes that are equal differ by as much as wrong ones.
"""


_STEADY_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not depend on how long a pass is."""


@torch.no_grad()
def choose_forward(model: Model, asked: str) -> str:
    """Set `model.native` if it is asked for and its logits agree with transformers'.

    If it is not used, transformers' forward pass is checked. Returns which forward pass it is, and
    why.

    Raises:
        UserError: neither can be used.
    """
    if asked not in FORWARDS:
        raise UserError(f"{model.name}: forward={asked}; choose one of {', '.join(FORWARDS)}.")
    model.probe, model.noise = _probe(model)
    reason = ""
    if asked != "transformers":
        try:
            model.native = native_forward(model)
            bound = allowed(model, SAME.get(model.dtype, HALF))
            checks = _head_difference, tree_difference, _far_difference
            difference = float(torch.tensor([check(model) for check in checks]).max())  # or NaN
            if difference <= bound:
                return (
                    f"native ({model.config.model_type}; over text, trees and far positions its"
                    f" logits are transformers' to {max(difference, 1e-9):.0e} of the largest,"
                    f" whose own agree to {max(model.noise, 1e-9):.0e}; large products:"
                    f" {model.native.way})"
                )
            reason = (
                f"its logits differ from transformers' by {difference:.1g} of the largest, and"
                f" {bound:.2g} is allowed"
            )
        except NotNativeError as error:
            reason = str(error)
        except FAULTS as error:
            reason = f"it failed ({cause(model, error)})"
        model.native = None
    if asked == "native":
        raise UserError(
            f"{model.name}: model.forward=native is not possible: {reason}. Set"
            " model.forward=auto, which takes transformers' forward pass for such a model."
        )
    if maskless := _maskless(model) or _mask_fault(model):
        return _by_branches(model, maskless)
    return f"transformers' (no native one: {reason})" if reason else "transformers'"


def native_forward(model: Model, way: str | None = None) -> NativeForward:
    """Make the native forward of a model's family. Raises NotNativeError where there is none.

    way: of multiplying large matrices; None: the one that `model.products` asks for.
    """
    if reason := _foreign(model):
        raise NotNativeError(reason)
    if way is None:
        way = "plain"
        if max(weight.numel() for weight in model.module.parameters()) >= fused_weights.LEAST:
            way = fastest(model.module, model.products, model.packs)
    native: NativeForward = FAMILIES[model.config.model_type](
        model.body, model.lm_head, model.config, way, model.owned
    )
    return native


def _foreign(model: Model) -> str | None:
    """Tell why a model has no native pass, as far as its configuration shows; None if it may."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"there is none for models of type {config.model_type}"
    if len({weight.device for weight in model.module.parameters()}) > 1:
        return "its weights lie on several devices"
    if optional(model.module, "is_quantized", False):
        return "its weights are quantised"
    if optional(config, "use_bidirectional_attention", False):
        return "its attention looks ahead"
    ropes = config.rope_parameters or {}
    parts = [entry for entry in ropes.values() if isinstance(entry, dict)] or [ropes]
    for rope in parts:
        if (kind := rope.get("rope_type", "default")) not in _STEADY_ROPES:
            return f"its rotary positions are of type {kind}"
    return None


def cause(model: Model, error: Exception) -> str:
    """Return an error of a pass in words; raises UserError where memory is short."""
    if memory_is_short(error):
        raise UserError(
            f"{model.name}: there is no memory for its first passes ({first_line(error)}). Free"
            " some, or load it in a smaller type (model.dtype=bfloat16)."
        ) from error
    return first_line(error)


def allowed(model: Model, least: float) -> float:
    """Return the difference from transformers' logits, at least `least`, that rounding explains."""
    return min(max(least, _NOISE * model.noise), _AT_MOST * least)


def _probe(model: Model) -> tuple[list[int], float]:
    """Choose the tokens of checks, and measure how far transformers' own passes over them differ.

    One pass is compared with one over their first half and then token by token, and sdpa with eager
    attention. The difference is 0 where the model cannot run these.
    """
    rows, found = min(model.vocab_size, model._embedded), []
    try:
        _plain(model, [0])
    except ImportError:  # of attention that takes no tree; the checks say so
        pass
    except FAULTS as error:
        raise UserError(
            f"{model.name}: it cannot run a token ({cause(model, error)}). Mend that, or choose"
            " another model."
        ) from error
    for place in _STRETCHES:
        tokens = [(int(place * rows) + at) % rows for at in range(8)]
        try:
            noise = _own_difference(model, tokens)
        except FAULTS:  # the checks say what a model cannot run
            noise = 0.0
        found.append((noise, tokens))
        if _NOISE * noise <= _AT_MOST * SAME.get(model.dtype, HALF):
            break
    noise, probe = min(found)
    return probe, noise


def _own_difference(model: Model, tokens: list[int]) -> float:
    whole = _plain(model, tokens)
    memory, parts = dict[str, Any](), []
    for part in torch.tensor([tokens], device=model.device).split([4, 1, 1, 1, 1], 1):
        output = model.module(input_ids=part, use_cache=True, **memory)
        memory = {model.original.memory: output[model.original.memory]}
        parts.append(output.logits)
    others = [torch.cat(parts, 1)]
    if optional(model.config, "_attn_implementation") == "sdpa":
        others.append(_plain(_configured(model, {"_attn_implementation": "eager"}), tokens))
    return max(_apart(_middle(other), _middle(whole)) for other in others)


def _plain(model: Model, tokens: list[int], **options: Any) -> Tensor:
    """Return the logits of transformers' own pass over a text."""
    ids = torch.tensor([tokens], device=model.device)
    return model.module(input_ids=ids, use_cache=False, **options).logits


def check_readout(model: Model) -> None:
    """Raise UserError where the readout does not give the logits."""
    head = _head_difference(model)
    if not head <= max(1e-3, 4 * torch.finfo(model.dtype).eps):
        readout = model.readout
        raise UserError(
            f"{model.name}: its logits differ by up to {head:.2g} from those that its lm_head and"
            f" its configuration (scale {readout.scale:g}, soft cap {readout.cap}) give for its"
            " last hidden state, as a fraction of the largest. Labels, features and draft heads"
            " rely on them. Choose another model."
        )


def _head_difference(model: Model) -> float:
    """Return how far `hidden` and `logits` are from the module's logits.

    It is the largest difference, divided by the largest logit.
    """
    tokens = torch.tensor([model.probe[:4]], device=model.device)
    full = _plain(model, model.probe[:4])
    if not float(full.abs().max()) <= LARGEST:  # nor is NaN
        raise UserError(
            f"{model.name}={model.module.name_or_path}: a first pass gives numbers that are NaN,"
            f" infinite or beyond {LARGEST:g}, so nothing can be sampled. Check its weights and"
            " what config.json says of it (rope_parameters, rms_norm_eps, sizes), or download the"
            " model again."
        )
    positions = torch.arange(4, device=model.device)[None]
    return _apart(model.logits(model.hidden(tokens, positions, None, None)), full)


def tree_difference(model: Model) -> float:
    """Return the difference between two branches in one pass and each alone in transformers'.

    The branches follow a prefix; windows of 3 tokens are included. For native passes on a GPU the
    prefix is so long that attention goes in two parts there.
    """
    model = _configured(model, {key: 3 for key in WINDOW_KEYS if optional(model.config, key)})
    tokens = model.probe[1:]
    in_parts = model.device.type == "cuda" and model.native and not model.native.capped
    longer = min(OPEN if in_parts else _BEFORE, model.max_context - 12)
    before = (model.probe * -(-longer // 8))[:longer]
    session = model.session()
    session.append([*before, *tokens[:2]])
    session.grow(tokens[2:5], [-1, 0, 0])  # rows 1 and 2 are siblings, 3 and 4 their children
    states = [*session.grow(tokens[5:], [1, 2])]
    session.commit([0, 2, 4])
    states.append(session.append(tokens[:1])[-1])
    session.grow(tokens[:2], [-1, 0])
    session.commit([0])
    states.append(session.append(tokens[1:3])[-1])
    ours = model.logits(torch.stack(states))
    kept = [*before, *tokens[:3], *tokens[4:7:2]]
    first = [*before, *tokens[:3], *tokens[3:6:2]]
    texts = first, kept, [*kept, tokens[0]], [*kept, tokens[0], *tokens[:3]]
    # Logits of the last token alone, where the model can: for OPEN tokens they take gigabytes.
    known = "logits_to_keep" in signature(model.module.forward).parameters
    last = {"logits_to_keep": 1} if known else {}
    alone = torch.stack([_plain(model, text, **last)[0, -1].clone() for text in texts])
    return _apart(_middle(ours), _middle(alone))


def _configured(model: Model, changes: dict[str, Any]) -> Model:
    """Copy a model, with changes of its configuration, on the same weights.

    Its modules and configurations are copied too, since other threads may be using the user's.
    """
    shared = (*model.module.parameters(), *model.module.buffers())
    copies: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    other = copy(model)
    other.module = deepcopy(model.module, copies)
    other.config = copies[id(model.config)]
    for key, value in changes.items():
        setattr(other.config, key, value)
    other.windows, other.body = windows(other.config), body_of(other.module)
    other.original = type(model.original)(other.body)
    return other


def _far_difference(model: Model) -> float:
    """Return the difference between `hidden` and transformers' pass at far positions.

    The far rows look back at the first ones.
    """
    far = min(_FAR, model.max_context - 3)
    positions = torch.tensor([[0, 1, 2, far, far + 1, far + 2]], device=model.device)
    tokens = torch.tensor([model.probe[:6]], device=model.device)
    blocked = torch.finfo(model.dtype).min
    mask = torch.full((1, 1, 6, 6), blocked, dtype=model.dtype, device=model.device).triu_(1)
    passes = model.hidden, partial(model.original, windows=model.windows)
    ours, theirs = (model.logits(run(tokens, positions, mask, None)) for run in passes)
    return _apart(_middle(ours), _middle(theirs))


def _middle(logits: Tensor) -> Tensor:
    """Logits of the middle of the vocabulary: tied with huge rows, others are huge too."""
    count = logits.shape[-1]
    return logits[..., count // 4 : count - count // 4]


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of logits, as a fraction of the largest; NaN where one is no number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def _maskless(model: Model) -> str | None:
    """Tell why a transformers model cannot run several branches in one pass; None if it may.

    Only its configuration is read.
    """
    config, kinds = model.config, layer_kinds(model.config)
    if optional(model.module, "_is_stateful", False) or kinds & {
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


def _mask_fault(model: Model) -> str | None:
    """Tell why one pass of transformers' cannot hold a tree; None if it can."""
    try:
        check_readout(model)
        difference = tree_difference(model)
    except FAULTS as error:
        return f"its attention does not take a mask of one row a token ({cause(model, error)})"
    if difference <= allowed(model, _CLOSE.get(model.dtype, HALF)):
        return None
    return (
        f"in a pass over a tree its logits differ by {difference:.2g} from those of each branch"
        " alone, as a fraction of the largest: its attention does not follow the mask and the"
        " positions that it is given"
    )


def _by_branches(model: Model, maskless: str) -> str:
    """Let trees be scored branch by branch; return that in words.

    Chunks of tokens are as exact as tokens one by one, or these are taken.

    Raises:
        UserError: neither gives the logits of plain passes.
    """
    model.original = BranchForward(model.body)
    differences, fault = {}, ""
    for form in ("tokens", "branches"):
        model.form = form
        try:
            check_readout(model)
            differences[form] = tree_difference(model)
        except FAULTS as error:
            fault = f"it failed ({cause(model, error)})"
    if selected := optional(model.config, "index_topk"):
        # Beyond so many tokens, ties decide what is attended to, and they fall by a pass's length.
        model.max_context = min(model.max_context, selected)
    bound = allowed(model, SAME.get(model.dtype, HALF))
    one, chunk = (differences.get(form, float("inf")) for form in ("tokens", "branches"))
    if chunk <= min(bound, max(_ROUNDING, _AS_EXACT * one)):
        return f"transformers', a tree as a batch of its branches ({maskless})"
    if one <= bound:
        model.form = "tokens"
        return (
            f"transformers', a tree as a batch of its branches, token by token ({maskless}; passes"
            f" over several tokens are off by {chunk:.1g} of the largest logit): no draft pays"
        )
    fault = fault or f"its logits are off by {min(one, chunk):.1g} of the largest"
    raise UserError(
        f"{model.name}: {maskless}, so one pass cannot hold a tree; and branch by branch {fault}."
        " Choose another model."
    )
