"""Tiny targets with random weights and grouped key/value heads, and heads that are not quite untrained."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.model import CausalModel
from draft_training.head import EagleHead


def tiny_target(vocabulary: int = 29, hidden: int = 16, layers: int = 2, seed: int = 0) -> CausalModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return CausalModel(LlamaForCausalLM(config), "tiny")


def random_head(target: CausalModel, seed: int = 1) -> EagleHead:
    """A head in which everything matters: no weight near zero, a post-attention norm that is not all ones."""
    torch.manual_seed(seed)
    head = EagleHead(target)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.2 * torch.randn_like(weight) + (weight.ndim == 1))
    return head.eval()
