"""The decoder layer of a draft head, as transformers builds it for the target's family: Llama, Qwen2, Qwen3 or Gemma 3.

A head's layer has no input norm, whatever the family: its input is not a residual stream. Targets of other families get a
Llama layer of their sizes. Which layers the layout of vLLM's EAGLE loader can hold is said here too. It knows no weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from decoding.common.errors import UserError
from decoding.model import CausalModel
from draft_training.settings import FAMILY, LAYERS, LLAMA

_LLAMA_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_LLAMA_SIZES += ("max_position_embeddings", "rms_norm_eps", "rope_parameters")
_NOT_COPIED = ("architectures", "dtype", "quantization_config", "transformers_version", "_name_or_path")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class NoHead(UserError):
    """No draft head can be built for a target."""


@dataclass(frozen=True)
class Family:
    """Classes of one family. norms_heads: whether queries and keys are normalised, which vLLM's EAGLE layer can't hold; nor
    can it norms after attention and MLP (sandwich)."""

    name: str
    config: type[PreTrainedConfig]
    layer: type[nn.Module]
    rotary: type[nn.Module]
    norms_heads: bool = False
    sandwich: bool = False


_FAMILIES = {
    "llama": Family("llama", LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen2": Family("qwen2", Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "qwen3": Family("qwen3", Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding, norms_heads=True),
    "gemma3_text": Family("gemma3_text", Gemma3TextConfig, Gemma3DecoderLayer, Gemma3RotaryEmbedding, True, True),
}


def family_of(target: CausalModel, layer: str = FAMILY) -> Family:
    """The family that a head's layer for `target` is of. layer: see `HeadConfig.layer`. Raises UserError for another word."""
    if layer not in LAYERS:
        raise UserError(f"draft.layer={layer}: choose one of {', '.join(LAYERS)}.")
    kind = getattr(target.config, "model_type", "") if layer == FAMILY else LLAMA
    return _FAMILIES.get(kind, _FAMILIES[LLAMA])


def check_readout(target: CausalModel) -> None:
    """Raise NoHead unless `target`'s lm_head and embedding are plain matrices that a head can share. Tied ones are."""
    lm_head, embedding = target.lm_head, target.module.get_input_embeddings()
    for what, module in (("lm_head", lm_head), ("embedding", embedding)):
        weight = getattr(module, "weight", None)
        plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[-1] == target.hidden_size
        if not plain or weight.dtype not in _FLOATS:
            found = str(weight.dtype).removeprefix("torch.") if isinstance(weight, Tensor) else type(weight).__name__
            raise NoHead(
                f"{target.name}: the weights of its {what} are quantised or packed ({found}), and a head's labels and "
                f"gradients go through them. Load the target with an unquantised {what} (its other layers may stay quantised)."
            )
    if getattr(lm_head, "bias", None) is not None:
        raise NoHead(f"{target.name}: its lm_head has a bias, which labels and losses leave out. Choose another target.")


def layer_config(target: CausalModel, family: Family) -> PreTrainedConfig:
    """Config of one full-attention layer of `family` with `target`'s sizes. Raises NoHead if a size is missing."""
    check_readout(target)
    if family.name == "llama":
        foreign = getattr(target.config, "model_type", "") in _FAMILIES.keys() - {"llama"}
        wanted = _LLAMA_SIZES if foreign else (*_LLAMA_SIZES, "hidden_act")
        if missing := [name for name in wanted if getattr(target.config, name, None) is None]:
            kind, lacking = getattr(target.config, "model_type", "unknown"), ", ".join(missing)
            raise NoHead(
                f"{target.name}: no draft head can be built for a model of type {kind}, whose config has no {lacking}. Choose "
                "another target, or leave head out of evaluation.methods."
            )
        fields = _llama_fields(target.config) | {"hidden_act": "silu" if foreign else target.config.hidden_act}
    else:
        fields = {name: value for name, value in target.config.to_dict().items() if name not in _NOT_COPIED}
        fields["layer_types"] = ["full_attention"]
    if getattr(target.config, "attn_logit_softcapping", None):
        raise UserError(f"{target.name}: attention with soft-capped scores is not supported. Choose another target.")
    config = family.config(**fields | {"num_hidden_layers": 1, "tie_word_embeddings": False})
    config.architectures = [f"{family.config.__name__.removesuffix('Config').removesuffix('Text')}ForCausalLM"]
    config._attn_implementation = "sdpa"
    return config


def rotary_of(family: Family, config: PreTrainedConfig) -> tuple[nn.Module, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """The family's rotary module, and a function of (states, positions) that gives (cos, sin)."""
    rotary = family.rotary(config)
    return rotary, partial(rotary, layer_type="full_attention") if family.name == "gemma3_text" else rotary


def not_for_vllm(family: Family) -> str | None:
    """Why vLLM's EAGLE loader can't hold a layer of this family; None if it can."""
    norms = [("of queries and keys", family.norms_heads), ("after attention and MLP", family.sandwich)]
    if not (parts := [f"norms {where}" for where, there in norms if there]):
        return None
    return (
        f"a {family.name} layer has {' and '.join(parts)}, which vLLM's EAGLE layout has no place for: this head serves the "
        "torch loop only. Train it with draft.layer=llama to serve it in vLLM."
    )


def served_config(config: PreTrainedConfig, family: Family) -> dict:
    """config.json of an exported head. A Qwen2 layer is a Llama layer with `qkv_bias`, which vLLM's Llama layer reads."""
    if family.name != "qwen2":
        return config.to_dict()
    fields = _llama_fields(config) | {"hidden_act": config.hidden_act}
    llama = LlamaConfig(**fields, num_hidden_layers=1, tie_word_embeddings=False)
    llama.architectures = ["LlamaForCausalLM"]
    return llama.to_dict() | {"qkv_bias": True}


def _llama_fields(config: PreTrainedConfig) -> dict:
    """The sizes of a Llama layer as in `config`. Some configs have rope parameters by kind of layer."""
    fields = {name: getattr(config, name) for name in _LLAMA_SIZES}
    rope = fields["rope_parameters"]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return fields | {"rope_parameters": rope.get("full_attention", rope), "head_dim": width}
