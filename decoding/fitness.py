"""Checks that a model can be decoded with: it obeys a tree mask, and its logits are its readout's.

Before a native forward is used, its logits are compared with transformers'.
"""

import math
from copy import copy, deepcopy
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from nde_talf.decoding.common.errors import UserError, first_line, memory_is_short
from nde_talf.decoding.forward import layer
from nde_talf.decoding.forward.attention import OPEN
from nde_talf.decoding.forward.layer import NotNativeError
from nde_talf.decoding.forward.original import WINDOW_KEYS, optional, windows
from nde_talf.decoding.registry import FAMILIES, FORWARDS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from nde_talf.decoding.forward.native import NativeForward
    from nde_talf.decoding.model import CausalModel

HALF = 0.05
# Between the native forward and transformers', whose norms and angles are computed in float32 at
# the widest.
SAME = {torch.float64: 1e-4, torch.float32: 1e-4}
_NOISE, _AT_MOST = 3, 4
"""How many times the difference between transformers' own passes logits may differ, and how many
times the bound without it: beyond, a fault would pass for rounding.
"""
LARGEST = 1e9
"""Magnitude beyond which no number of a trained model lies."""
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
_SLOTS = 1024  # of trees in flight, beyond the text


_STEADY_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not depend on how long a pass is."""


_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")


@torch.no_grad()
def choose_forward(model: "CausalModel", asked: str) -> str:
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
    from nde_talf.decoding.branches import choose_form

    return choose_form(model, reason)


def native_forward(model: "CausalModel", way: str | None = None) -> "NativeForward":
    """Make the native forward of a model's family. Raises NotNativeError where there is none.

    way: of multiplying large matrices; None: the one that `model.products` asks for.
    """
    if reason := _foreign(model):
        raise NotNativeError(reason)
    if way is None:
        way = "plain"
        if max(weight.numel() for weight in model.module.parameters()) >= layer.LEAST:
            from nde_talf.decoding.forward.fastest import fastest

            way = fastest(model.module, model.products, model.packs)
    native: NativeForward = FAMILIES[model.config.model_type](model, way)
    return native


def _foreign(model: "CausalModel") -> str | None:
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


def cause(model: "CausalModel", error: Exception) -> str:
    """Return an error of a pass in words; raises UserError where memory is short."""
    if memory_is_short(error):
        raise UserError(
            f"{model.name}: there is no memory for its first passes ({first_line(error)}). Free"
            " some, or load it in a smaller type (model.dtype=bfloat16)."
        ) from error
    return first_line(error)


def allowed(model: "CausalModel", least: float) -> float:
    """Return the difference from transformers' logits, at least `least`, that rounding explains."""
    return min(max(least, _NOISE * model.noise), _AT_MOST * least)


def _probe(model: "CausalModel") -> tuple[list[int], float]:
    """Choose the tokens of checks, and measure how far transformers' own passes over them differ.

    One pass is compared with one over their first half and then token by token, and sdpa with eager
    attention. The difference is 0 where the model cannot run these.
    """
    rows, found = min(model.vocab_size, model._embedded), []
    try:
        _plain(model, [0])
    except ImportError:  # of attention that takes no tree, which is told then
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


def _own_difference(model: "CausalModel", tokens: list[int]) -> float:
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


def _plain(model: "CausalModel", tokens: list[int], **options: Any) -> Tensor:
    """Return the logits of transformers' own pass over a text."""
    ids = torch.tensor([tokens], device=model.device)
    return model.module(input_ids=ids, use_cache=False, **options).logits


def check_readout(model: "CausalModel") -> None:
    """Raise UserError where logits are not those of the readout."""
    head = _head_difference(model)
    if not head <= max(1e-3, 4 * torch.finfo(model.dtype).eps):
        readout = model.readout
        raise UserError(
            f"{model.name}: its logits differ by up to {head:.2g} from those that its lm_head and"
            f" its configuration (scale {readout.scale:g}, soft cap {readout.cap}) give for its"
            " last hidden state, as a fraction of the largest. Labels, features and draft heads"
            " rely on them. Choose another model."
        )


def _head_difference(model: "CausalModel") -> float:
    """Return the difference between the module's logits and those of `hidden` and `logits`.

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


def tree_difference(model: "CausalModel") -> float:
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
    # Logits of the last token alone, where the model can: those of OPEN tokens take gigabytes.
    known = "logits_to_keep" in signature(model.module.forward).parameters
    last = {"logits_to_keep": 1} if known else {}
    alone = torch.stack([_plain(model, text, **last)[0, -1].clone() for text in texts])
    return _apart(_middle(ours), _middle(alone))


def _configured(model: "CausalModel", changes: dict[str, Any]) -> "CausalModel":
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


def _far_difference(model: "CausalModel") -> float:
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


def longest_context(config: "PretrainedConfig") -> int:
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


def forget_sampling_advice(module: "PreTrainedModel") -> None:
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


def scale_and_cap(config: "PretrainedConfig") -> tuple[float, float | None]:
    """A `Readout`'s scale and cap, as a model's text configuration says."""
    factors, divisors = (
        math.prod(optional(config, name) or 1.0 for name in names)
        for names in (_FACTORS, _DIVISORS)
    )
    # The logits_scaling of HyperCLOVA X is a factor.
    scale = factors * divisors if config.model_type == "hyperclovax" else factors / divisors
    return scale, optional(config, "final_logit_softcapping")


def body_of(model: "PreTrainedModel") -> nn.Module:
    """Return the module that makes hidden states of tokens.

    In a model with a part for images, say, it is the part that reads text.
    """
    body = cast("nn.Module", model.get_decoder())
    return cast("nn.Module", body.model) if body is model else body
