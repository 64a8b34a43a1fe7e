"""Fields of a transformers model's configuration that decoding reads."""

import math
from typing import cast

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from nde_talf.decoding.models.forward.transformers import optional

_SLOTS = 1024  # of trees in flight, beyond the text


_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")


def longest_context(config: PretrainedConfig) -> int:
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


def bytes_of_context(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return what the cache takes for a token; 0 without attention, as in Mamba."""
    given = config.to_dict()
    if not (heads := given.get("num_attention_heads")):
        return 0
    keys = given.get("num_key_value_heads") or heads
    keys *= given.get("head_dim") or given["hidden_size"] // heads
    return int(2 * given["num_hidden_layers"] * keys * dtype.itemsize)


def forget_sampling_advice(module: PreTrainedModel) -> None:
    """Drop the advice of a model's generation_config.json except its special tokens.

    The advice is about temperature, repetition penalty, min-p and the like. Sampling here follows
    the setting asked for, and nothing else.
    """
    advice = module.generation_config
    kept = {
        name: getattr(advice, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    module.generation_config = GenerationConfig(**kept)


def scale_and_cap(config: PretrainedConfig) -> tuple[float, float | None]:
    """Return a `Readout`'s scale and cap from a model's text configuration."""
    factors, divisors = (
        math.prod(optional(config, name) or 1.0 for name in names)
        for names in (_FACTORS, _DIVISORS)
    )
    # The logits_scaling of HyperCLOVA X is a factor.
    scale = factors * divisors if config.model_type == "hyperclovax" else factors / divisors
    return scale, optional(config, "final_logit_softcapping")


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that makes hidden states of tokens.

    In a model with a part for images, say, it is the part that reads text.
    """
    body = cast("nn.Module", model.get_decoder())
    return cast("nn.Module", body.model) if body is model else body
