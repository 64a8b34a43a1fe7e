"""Decoder layers of draft heads, as transformers builds them for the target's family.

A head's layer has no input norm, whatever the family: its input is not a residual stream. Its
attention sees the full text, also where the target's layers have a sliding window or soft-capped
scores: vLLM's EAGLE loader reads a Llama config, which has neither. Targets of other families
(Mistral, Granite, ...) get a Llama layer of their sizes. `not_for_vllm` names the layers that
vLLM's EAGLE loader cannot hold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.registry import HEADS, head_layer
from nde_talf.draft_training.training_settings import FAMILY

_LLAMA_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_parameters",
)
_EPS = 1e-5
_NOT_COPIED = (
    "architectures",
    "dtype",
    "quantization_config",
    "transformers_version",
    "_name_or_path",
)
_CAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class NoHeadError(UserError):
    """No draft head can be built for a target."""


@dataclass(frozen=True)
class Family:
    """Classes of one family.

    Attributes:
        norms_heads: whether queries and keys are normalised; not in vLLM's EAGLE layer.
        sandwich: whether there are norms after attention and MLP; not in vLLM's EAGLE layer.
    """

    name: str
    config: type[PreTrainedConfig]
    layer: type[nn.Module]
    rotary: type[nn.Module]
    norms_heads: bool = False
    sandwich: bool = False


LLAMA = Family("llama", LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding)
for each in (
    LLAMA,
    Family("qwen2", Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    Family("qwen3", Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding, norms_heads=True),
    Family("gemma2", Gemma2Config, Gemma2DecoderLayer, Gemma2RotaryEmbedding, sandwich=True),
    Family("gemma3_text", Gemma3TextConfig, Gemma3DecoderLayer, Gemma3RotaryEmbedding, True, True),
):
    head_layer(each.name)(each)


def family_of(target: CausalModel, layer: str) -> Family:
    """Return the family of a head's layer for `target`.

    layer: see `HeadConfig.layer`, or the name of a family: a published head may have another than
    its target.
    """
    return family_named(target.config.model_type, layer)


def family_named(model_type: str, layer: str) -> Family:
    """Return the family of a head's layer beside a target of transformers' `model_type`."""
    kind = model_type if layer == FAMILY else layer
    return HEADS[kind if kind in HEADS else LLAMA.name]


def check_readout(target: CausalModel) -> None:
    """Raise NoHeadError unless `target`'s lm_head and embedding are plain matrices, tied or not."""
    modules = {"lm_head": target.lm_head, "embedding": target.module.get_input_embeddings()}
    for what, module in modules.items():
        parameters = dict(module.named_parameters(recurse=False))
        weight = parameters.get("weight", torch.empty(0, dtype=torch.uint8))
        if weight.shape[1:] != (target.hidden_size,) or weight.dtype not in _FLOATS:
            raise NoHeadError(
                f"{target.name}: the weights of its {what} are quantised or packed"
                f" ({weight.dtype}), and a head's labels and gradients go through them. Load the"
                f" target with an unquantised {what} (its other layers may stay quantised)."
            )
        if "bias" in parameters:
            raise NoHeadError(
                f"{target.name}: its {what} has a bias, which labels and losses leave out. Choose"
                " another target."
            )


def layer_config(target: CausalModel, family: Family) -> PreTrainedConfig:
    """Make the config of one full-attention layer of `family` with `target`'s sizes.

    Raises NoHeadError if a size is missing.
    """
    check_readout(target)
    kind = target.config.model_type
    if family is LLAMA or family.name != kind:
        fields = _llama_fields(target.config)
        if missing := [name for name, value in fields.items() if value is None]:
            raise NoHeadError(
                f"{target.name}: no draft head can be built for a model of type {kind}, whose"
                f" config has no one value for {', '.join(missing)}. Choose another target, or"
                " leave head out of evaluation.methods."
            )
        fields["hidden_act"] = "silu"  # vLLM's Llama has no other
    else:
        given = target.config.to_dict()
        fields = {name: value for name, value in given.items() if name not in _NOT_COPIED}
        fields |= dict.fromkeys(_CAPS & fields.keys()) | {"layer_types": ["full_attention"]}
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": False, "vocab_size": target.vocab_size}
    config = family.config(**fields | sizes)
    config.architectures = [
        f"{family.config.__name__.removesuffix('Config').removesuffix('Text')}ForCausalLM"
    ]
    config._attn_implementation = "sdpa"
    return config


def rotary_of(
    family: Family, config: PreTrainedConfig
) -> tuple[nn.Module, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Return the rotary module, and a function from (states, positions) to (cos, sin)."""
    rotary = family.rotary(config)
    by_kind = family.name == "gemma3_text"
    return rotary, partial(rotary, layer_type="full_attention") if by_kind else rotary


def not_for_vllm(family: Family) -> str | None:
    """Return the reason why vLLM's EAGLE loader cannot hold this family's layer; None if it can."""
    parts = ["norms of queries and keys"] * family.norms_heads
    parts += ["norms after attention and MLP"] * family.sandwich
    if not parts:
        return None
    return (
        f"a {family.name} layer has {' and '.join(parts)}, which vLLM's EAGLE layout has no place"
        " for: such a head serves the torch loop only. Train it with draft.layer=llama to serve it"
        " in vLLM."
    )


def served_config(config: PreTrainedConfig, family: Family) -> dict:
    """Return config.json of an exported head.

    A Qwen2 layer is a Llama layer with `qkv_bias`, which vLLM's Llama layer reads.
    """
    if family.name != "qwen2":
        return config.to_dict()
    fields = _llama_fields(config) | {"hidden_act": config.hidden_act}
    llama = LlamaConfig(**fields, num_hidden_layers=1, tie_word_embeddings=False)
    llama.architectures = ["LlamaForCausalLM"]
    return llama.to_dict() | {"qkv_bias": True}


def _llama_fields(config: PreTrainedConfig) -> dict:
    """Return the sizes of a Llama layer from `config`; None for one that `config` lacks.

    Some configs have rope parameters by kind of layer. A Llama layer rotates all dimensions, also
    where the target rotates some.
    """
    fields = {name: _value(config, name) for name in _LLAMA_SIZES}
    rope = fields["rope_parameters"]
    rope = rope and rope.get("full_attention", rope)
    if rope and rope.get("partial_rotary_factor", 1) != 1:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    heads = fields["num_attention_heads"]
    return fields | {
        "rope_parameters": rope,
        "head_dim": _value(config, "head_dim") or (heads and config.hidden_size // heads),
        "rms_norm_eps": _value(config, "rms_norm_eps") or _EPS,
        # missing in GPT-NeoX's configuration
        "num_key_value_heads": fields["num_key_value_heads"] or heads,
    }


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of a config; None if it is missing or differs between layers."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers raises it for a value by layer
        return None
    return None if isinstance(value, list) else value
