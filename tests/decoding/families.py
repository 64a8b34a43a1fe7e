"""A tiny model of each family, with random weights."""

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from decoding.model import CausalModel

V, CONTEXT = 50, 96
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
ROTARY = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.3}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**ROTARY)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**ROTARY)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**ROTARY, head_dim=8)),
    "pythia": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**SIZES, intermediate_size=48, initializer_range=0.3, rotary_pct=0.25, use_parallel_residual=True)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=16, init_std=0.3, do_layer_norm_before=True, **SPECIAL)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3, **SPECIAL)
    ),
}


def family(name: str, noise: float = 0.0) -> CausalModel:
    torch.manual_seed(3)
    model = FAMILIES[name]()
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return CausalModel(model, name)
