"""Layers of heads beside targets of many families, and targets that can have none."""

import json

import pytest
import torch
from torch import nn

from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.model.families import not_for_vllm
from nde_talf.draft_training.model.head import EagleHead
from tests.draft_training.heads import FAMILIES, family_target, random_head, tiny_target
from tests.refusal import refusal


@pytest.mark.parametrize("family", FAMILIES)
def test_a_llama_layer_fits_beside_any_target(family, tmp_path):
    target = family_target(family)
    folder = save_head(random_head(target, layer="llama"), tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and config["hidden_act"] == "silu"
    assert load_head(folder, target).family.name == "llama"


def test_a_qwen2_head_is_a_llama_layer_with_query_key_value_biases_for_vllm(tmp_path):
    folder = save_head(random_head(family_target("qwen2")), tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["qkv_bias"] is True and not config["attention_bias"]


def test_layers_with_more_norms_say_that_vllm_cannot_hold_them():
    reasons = {family: not_for_vllm(EagleHead(family_target(family)).family) for family in FAMILIES}
    assert reasons["llama"] is None and reasons["qwen2"] is None
    assert "queries and keys" in reasons["qwen3"] and "after attention" in reasons["gemma3_text"]


def test_a_quantised_lm_head_is_refused():
    target = tiny_target()
    target.lm_head = nn.Module()  # its weights are packed under another name
    with refusal("quantised"):
        EagleHead(target)
    target = tiny_target()
    target.lm_head.weight.data = torch.zeros(29, 16, dtype=torch.int8)
    with refusal("int8"):
        EagleHead(target)
