"""A tiny model of each family, with random weights that are large enough for texts to differ, and
the family's peculiarities: windows of 16 tokens, read-outs, odd sizes of heads.
"""

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from nde_talf import CausalModel
from nde_talf.decoding.loading import architecture

V, CONTEXT, WINDOW = 50, 96, 16
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
} | SPECIAL
ROTARY = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.3}
SLIDING = {"sliding_window": WINDOW}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
ODD = {"head_dim": 12}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK = (
    LATENT
    | EXPERTS
    | {
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "topk_group": 1,
        "n_group": 1,
    }
)
DEEPSEEK |= {"n_shared_experts": 1, "num_key_value_heads": 4}
ROPE = {"rope_theta": 10000.0}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.1] * 4, "long_factor": [2.0] * 4}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
}
EYES |= {"patch_size": 8}

# By name the model type, and what differs from ROTARY. One with "text_config" is a model for images
# around a language model.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-2": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-3": (
        "llama",
        {"rope_parameters": ROPE | SCALED | {"original_max_position_embeddings": 32}},
    ),
    "mistral": ("mistral", SLIDING),
    "mistral-3": (
        "mistral3",
        {
            "text_config": SLIDING | {"model_type": "mistral"},
            "vision_config": {"model_type": "pixtral"},
        },
    ),
    "ministral": ("ministral", MIXED | ODD),
    "qwen2": ("qwen2", SLIDING | {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", SLIDING | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", ODD),
    "qwen3-moe": ("qwen3_moe", EXPERTS | ODD | {"num_experts": 4}),
    "mixtral": ("mixtral", SLIDING | {"num_local_experts": 4}),
    "gemma": ("gemma", ODD),
    "gemma-2": (
        "gemma2",
        MIXED | ODD | {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 6.0},
    ),
    "gemma-3": ("gemma3_text", MIXED | ODD | {"query_pre_attn_scalar": 20}),
    "gemma-3-images": (
        "gemma3",
        {
            "text_config": MIXED | ODD,
            "vision_config": {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma-3n": (
        "gemma3n_text",
        MIXED
        | ODD
        | {
            "num_hidden_layers": 4,
            "layer_types": MIXED["layer_types"] * 2,
            "num_kv_shared_layers": 2,
        }
        | {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": V,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        }
        | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    "gemma-4": (
        "gemma4_text",
        MIXED
        | ODD
        | {
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "phi": ("phi", {}),
    "phi-3": ("phi3", SLIDING),
    "phi-3-long": (
        "phi3",
        {"max_position_embeddings": 4 * CONTEXT, "original_max_position_embeddings": CONTEXT}
        | {"rope_parameters": ROPE | LONG | {"original_max_position_embeddings": CONTEXT}},
    ),
    "starcoder2": ("starcoder2", SLIDING),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "opt-350m": (
        "opt",
        {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.3, "do_layer_norm_before": False},
    ),
    "pythia": ("gpt_neox", {"rotary_pct": 0.25, "use_parallel_residual": True}),
    "gpt2": ("gpt2", {}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "granite": (
        "granite",
        {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    ),
    "cohere": ("cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere-2": ("cohere2", MIXED | {"logit_scale": 0.5}),
    "olmo-2": ("olmo2", {}),
    "olmo-3": ("olmo3", MIXED),
    "gpt-oss": (
        "gpt_oss",
        MIXED
        | ODD
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": ROPE | {"rope_type": "default"},
        },
    ),
    "llama-4": (
        "llama4_text",
        ODD
        | {"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}
        | {
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 1, 1, 0],
            "num_local_experts": 4,
            "moe_layers": [1, 3],
        }
        | {"intermediate_size_mlp": 48, "rope_parameters": ROPE | {"rope_type": "default"}},
    ),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK),
    "exaone-4": ("exaone4", MIXED | ODD),
    "glm-4": ("glm4", ODD),
    "smollm-3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
}
# Trees of these are scored branch by branch: in chunks, or token by token where a chunk is not exact.
BRANCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-2": ("mamba2", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "qwen3-next": (
        "qwen3_next",
        EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "gpt-neo": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "deepseek-v3.2": ("deepseek_v32", DEEPSEEK),
}
TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"state_size": 4}),
    "jamba": (
        "jamba",
        {"num_experts": 2, "attn_layer_period": 2, "mamba_d_state": 4, "attn_layer_offset": 1},
    ),
}
FORMS = dict.fromkeys(FAMILIES, "masks")
FORMS |= dict.fromkeys(BRANCHES, "branches") | dict.fromkeys(TOKENS, "tokens")
EVERY = FAMILIES | BRANCHES | TOKENS


def text(length: int, seed: int = 1) -> list[int]:
    """Return random tokens."""
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def module(model_type: str, changes: dict[str, Any], seed: int = 3) -> PreTrainedModel:
    """A model with random weights, loaded as `load_module` would."""
    if "text_config" in changes:
        parts = {
            "text_config": ROTARY | changes["text_config"],
            "vision_config": EYES | changes["vision_config"],
        }
        parts["text_config"]["vocab_size"] = changes.get("vocab_size", V)
        config = AutoConfig.for_model(model_type, **changes | parts)
    else:
        config = AutoConfig.for_model(model_type, **ROTARY | changes)
    auto, attention = architecture(config)
    torch.manual_seed(seed)
    return auto.from_config(config, attn_implementation=attention)


def family(name: str, noise: float = 0.0, rows: int = V) -> CausalModel:
    """The same weights at every call, plus `noise`; with other `rows` than V, those of the tokens
    in common.
    """
    kind, changes = EVERY[name]
    model = module(kind, changes)
    if rows != V:
        fewer = {"vocab_size": rows} | (
            {"vocab_size_per_layer_input": rows} if "vocab_size_per_layer_input" in changes else {}
        )
        whole, model = model, module(kind, changes | fewer)
        with torch.no_grad():
            for old, new in zip(whole.parameters(), model.parameters(), strict=True):
                new[: len(old)] = old[: len(new)]
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return CausalModel(model, name)
