"""Tiny targets with random weights and grouped key/value heads, and heads that are not quite
untrained.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nde_talf import CausalModel
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.draft_training.eagle3 import Eagle3Head
from nde_talf.draft_training.head import EagleHead


def sizes(vocabulary: int = 29, hidden: int = 16, layers: int = 2) -> dict:
    """Return the keys of a configuration that all families have."""
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def tiny_target(
    vocabulary: int = 29, hidden: int = 16, layers: int = 2, seed: int = 0
) -> CausalModel:
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes(vocabulary, hidden, layers), tie_word_embeddings=False)
    return CausalModel(LlamaForCausalLM(config), "tiny")


FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}


def family_target(family: str, tied: bool = False, hidden: int = 16) -> CausalModel:
    """A tiny target of a family, full attention in every layer, no weight at its neutral value."""
    config, model = FAMILIES[family]
    extra = {"head_dim": 8} if family in ("qwen3", "gemma2", "gemma3_text") else {}
    if family in ("gemma2", "gemma3_text"):
        extra |= {
            "attn_logit_softcapping": None,
            "layer_types": ["full_attention"] * 2,
            "sliding_window": 0,
            "query_pre_attn_scalar": 8,
        }
    made = config(**sizes(hidden=hidden), tie_word_embeddings=tied, pad_token_id=0, **extra)
    torch.manual_seed(0)
    target = model(made)
    with torch.no_grad():
        for weight in target.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    return CausalModel(target, family)


def random_head(
    target: CausalModel, seed: int = 1, layer: str = "family", vocabulary: list[int] | None = None
) -> EagleHead:
    """A head in which everything matters: no weight near zero, norms and biases that are not
    neutral.
    """
    head = _stirred(EagleHead, target, seed, layer)
    head.vocabulary = None if vocabulary is None else torch.tensor(vocabulary)
    return head


def random_eagle3(
    target: CausalModel,
    seed: int = 1,
    layer: str = "family",
    vocabulary: list[int] | None = None,
    norms: tuple[str, ...] = (),
) -> Eagle3Head:
    """The same on three layers' features."""
    drafted = None if vocabulary is None else torch.tensor(vocabulary)
    return _stirred(Eagle3Head, target, seed, layer, drafted, norms)


def _stirred(kind, target, seed, *how):
    torch.manual_seed(seed)
    head = kind(target, *how)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.2 * torch.randn_like(weight) + (weight.ndim == 1))
    return head.eval()


def predictable_rows(target: CausalModel, length: int, count: int = 24) -> torch.Tensor:
    """Rows [count, length] that can be predicted: each token is the one before it plus one or two."""
    steps = torch.randint(1, 3, (count, length), generator=torch.Generator().manual_seed(0))
    return steps.cumsum(1) % target.vocab_size


class KillBefore(pl.Callback):
    """Ends the run as a signal would: an exception between two steps."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise ProcessLookupError


def same(one: nn.Module, two: nn.Module) -> bool:
    """Whether all weights are equal, bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def batch_of(rows, *places: int) -> TokenRows:
    rows = rows if isinstance(rows, TokenRows) else TokenRows.plain(rows)
    return rows[torch.tensor(places or range(len(rows)))]
