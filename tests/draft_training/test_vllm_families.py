"""Heads beside targets of other families mean in vLLM what they mean here: the same text, as many drafts accepted."""

import importlib.util

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data.engines.vllm_speculation import head_method
from decoding.actions import Action
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.delayed import Delayed
from decoding.sampling import Rng, SamplingSetting
from decoding.verification import VERIFIERS
from draft_training.export import save_head
from draft_training.head_drafter import EagleDrafter
from draft_training.settings import HeadConfig, TalfLoss
from draft_training.train_head import fit_head
from tests.draft_training.in_vllm import DRAFTED, NEW_TOKENS, VOCABULARY, in_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}  # shorter than the texts
TARGETS = {
    "a Qwen2 layer, lm_head tied": ("qwen2", "family", {}),
    "a Llama layer beside Qwen3, lm_head tied": ("qwen3", "llama", {"head_dim": 32}),
    "a Llama layer beside Mistral with a window": ("mistral", "family", {"sliding_window": 16, "tie_word_embeddings": False}),
    "a Llama layer beside Granite, whose logits are scaled": ("granite", "family", {"logits_scaling": 0.5}),
    "a Llama layer beside Gemma 3": ("gemma3_text", "llama", {"head_dim": 32, "query_pre_attn_scalar": 32} | WINDOW),
}


@pytest.mark.parametrize(("kind", "layer", "own"), TARGETS.values(), ids=TARGETS)
def test_vllm_accepts_as_many_drafts_as_the_torch_loop(kind, layer, own, tmp_path):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.15, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | own))
    with torch.no_grad():
        for weight in target.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    target.save_pretrained(tmp_path / "target")
    target = CausalModel.load(tmp_path / "target")
    rows = torch.randint(VOCABULARY, (64, 32))
    settings = HeadConfig(layer=layer, loss=TalfLoss(k=2), roots=4, steps=150, batch=8, warm_up=4, chain_fraction=0.3)
    head = save_head(fit_head(target, rows, settings, tmp_path / "training"), tmp_path / "head")

    prompts = [row[:6].tolist() for row in rows[:8]]
    theirs = in_vllm(tmp_path, head_method(head, DRAFTED), prompts)["greedy"]
    drafter = EagleDrafter.from_pretrained(head, target)
    decoder = SpeculativeDecoder(target, drafter, Delayed(Action(1, 0, DRAFTED)), VERIFIERS["naive"])
    ours = [decoder.generate(prompt, NEW_TOKENS, SamplingSetting(0.0), Rng.seeded(0)) for prompt in prompts]
    assert [one["tokens"] for one in theirs] == [generation.tokens for generation in ours]
    accepted = [[sum(step.tau > at for step in generation.steps) for at in range(DRAFTED)] for generation in ours]
    assert [one["accepted"] for one in theirs] == accepted
    assert sum(map(sum, accepted)) > 0.3 * sum(len(generation.steps) for generation in ours)
