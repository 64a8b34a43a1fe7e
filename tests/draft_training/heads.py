"""Tiny targets with random weights and grouped key/value heads, and heads that are not quite
untrained.
"""

import pytorch_lightning as pl
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nde_talf import CausalModel
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.draft_training.model.eagle3 import Eagle3Head
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.training.losses import NodeLosses, target_law, weighted_labels


def sizes(vocabulary=29, hidden=16, layers=2):
    """Return the keys of a configuration that all families have."""
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def tiny_target(vocabulary=29, hidden=16, layers=2, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes(vocabulary, hidden, layers), tie_word_embeddings=False)
    return CausalModel(LlamaForCausalLM(config), "tiny")


FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")


def family_target(family, tied=False, hidden=16):
    """A tiny target of a family, full attention in every layer, no weight at its neutral value."""
    extra = {"head_dim": 8} if family in ("qwen3", "gemma2", "gemma3_text") else {}
    if family in ("gemma2", "gemma3_text"):
        extra |= {
            "attn_logit_softcapping": None,
            "layer_types": ["full_attention"] * 2,
            "sliding_window": 0,
            "query_pre_attn_scalar": 8,
        }
    extra |= sizes(hidden=hidden) | {"tie_word_embeddings": tied, "pad_token_id": 0}
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **extra))
    with torch.no_grad():
        for weight in target.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    return CausalModel(target, family)


def random_head(target, seed=1, layer="family", vocabulary=None):
    """A head in which everything matters: no weight near zero, norms and biases that are not
    neutral.
    """
    head = _stirred(EagleHead, target, seed, layer)
    head.vocabulary = None if vocabulary is None else torch.tensor(vocabulary)
    return head


def random_eagle3(target, seed=1, layer="family", vocabulary=None, norms=()):
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


def predictable_rows(target, length, count=24):
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


def same(one, two):
    """Whether all weights are equal, bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def batch_of(rows, *places):
    rows = rows if isinstance(rows, TokenRows) else TokenRows.plain(rows)
    return rows[torch.tensor(places or range(len(rows)))]


def written_out(features, labels, readout, counts, weights):
    """Compute `talf_loss` of all rows at once: the reference."""
    log_q = readout.of_head(features).log_softmax(-1)
    p, best = target_law(labels, readout)
    loss = -(weighted_labels(p, weights) * log_q).sum(-1)
    return NodeLosses(loss @ counts, loss.detach(), log_q.argmax(-1) == best)
