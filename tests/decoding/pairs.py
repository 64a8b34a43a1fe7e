"""Tiny real pairs: Llamas with random weights, the draft a noisy copy of the target so that drafts
are accepted.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nde_talf import CausalModel


def tiny_model(vocabulary, hidden=16, layers=1, seed=0, scale=1.0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return CausalModel(model, "tiny")


def tiny_pair(vocabulary, noise=0.05, **sizes):
    """A target, and a draft whose weights are the target's plus `noise`."""
    target, draft = tiny_model(vocabulary, **sizes), tiny_model(vocabulary, **sizes)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.module.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return target, draft


def prompts(count, vocabulary):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (5 + i,), generator=generator).tolist() for i in range(count)]
