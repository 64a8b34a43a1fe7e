"""Checks that a model can be decoded with: it obeys a tree mask, and its logits are its readout's.

Before a native forward is used, its logits are compared with transformers'.
"""

import math
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nde_talf.decoding.common.errors import UserError, first_line
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
    reason = ""
    if asked != "transformers":
        try:
            model.native = native_forward(model)
            bound = SAME.get(model.dtype, HALF)
            checks = _head_difference, tree_difference, _far_difference
            difference = float(torch.tensor([check(model) for check in checks]).max())  # or NaN
            if difference <= bound:
                return (
                    f"native ({model.config.model_type}; its logits are transformers' to"
                    f" {max(difference, 1e-9):.0e} of the largest; large products:"
                    f" {model.native.way})"
                )
            reason = (
                f"its logits differ from transformers' by {difference:.1g} of the largest, and"
                f" {bound:g} is allowed"
            )
        except NotNativeError as error:
            reason = str(error)
        except FAULTS as error:
            reason = f"it failed ({first_line(error)})"
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
    probe = torch.arange(4, device=model.device)[None]
    full = model.module(input_ids=probe % model.vocab_size, use_cache=False).logits
    if not float(full.abs().max()) <= LARGEST:  # nor is NaN
        raise UserError(
            f"{model.name}={model.module.name_or_path}: a first pass gives numbers that are NaN,"
            f" infinite or beyond {LARGEST:g}, so nothing can be sampled. Check its weights and"
            " what config.json says of it (rope_parameters, rms_norm_eps, sizes), or download the"
            " model again."
        )
    return _apart(model.logits(model.hidden(probe % model.vocab_size, probe, None, None)), full)


def tree_difference(model: "CausalModel") -> float:
    """Return the difference between two branches in one pass and each alone in transformers'.

    The branches follow a prefix; windows of 3 tokens are included. For native passes on a GPU the
    prefix is so long that attention goes in two parts there.
    """
    tokens = [token % model.vocab_size for token in range(1, 8)]
    in_parts = model.device.type == "cuda" and model.native and not model.native.capped
    longer = min(OPEN if in_parts else _BEFORE, model.max_context - 12)
    before = [token % model.vocab_size for token in range(longer)]
    session = model.session()
    sizes = {key: size for key in WINDOW_KEYS if (size := optional(model.config, key))}
    try:
        for key in sizes:
            setattr(model.config, key, 3)
        model.windows = windows(model.config)
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
        texts = [*before, *tokens[:3], *tokens[3:6:2]], kept, [*kept, tokens[0]]
        # Logits of the last token alone, where the model can: those of OPEN tokens take gigabytes.
        known = "logits_to_keep" in signature(model.module.forward).parameters
        last = {"logits_to_keep": 1} if known else {}
        plain = (
            model.module(
                input_ids=torch.tensor([text], device=model.device),
                use_cache=False,
                **last,
            )
            for text in (*texts, [*kept, tokens[0], *tokens[:3]])
        )
        alone = torch.stack([output.logits[0, -1].clone() for output in plain])
    finally:
        for key, size in sizes.items():
            setattr(model.config, key, size)
        model.windows = windows(model.config)
    return _apart(ours, alone)


def _far_difference(model: "CausalModel") -> float:
    """Return the difference between `hidden` and transformers' pass at far positions.

    The far rows look back at the first ones.
    """
    far = min(_FAR, model.max_context - 3)
    positions = torch.tensor([[0, 1, 2, far, far + 1, far + 2]], device=model.device)
    tokens, blocked = (positions + 1) % model.vocab_size, torch.finfo(model.dtype).min
    mask = torch.full((1, 1, 6, 6), blocked, dtype=model.dtype, device=model.device).triu_(1)
    passes = model.hidden, partial(model.original, windows=model.windows)
    ours, theirs = (model.logits(run(tokens, positions, mask, None)) for run in passes)
    return _apart(ours, theirs)


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
