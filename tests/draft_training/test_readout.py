"""Targets whose logits are scaled (Granite) or soft-capped (Gemma 2): so are labels, losses,
figures and what a head drafts from.
"""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import save_head
from nde_talf.draft_training.settings import HeadConfig, TalfLoss
from nde_talf.draft_training.target_trees import target_features
from nde_talf.draft_training.train_head import HeadModule
from tests.draft_training.heads import batch_of, random_eagle3, random_head

SIZES = {
    "vocab_size": 29, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.5,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
FULL = {
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 0,
    "attn_logit_softcapping": None,
    "head_dim": 8,
}


def granite() -> CausalModel:
    config = GraniteConfig(logits_scaling=4.0, tie_word_embeddings=True, **SIZES)
    torch.manual_seed(0)
    return CausalModel(GraniteForCausalLM(config), "granite")


def gemma2() -> CausalModel:
    config = Gemma2Config(final_logit_softcapping=2.0, query_pre_attn_scalar=8, **FULL, **SIZES)
    torch.manual_seed(0)
    return CausalModel(Gemma2ForCausalLM(config), "gemma2")


@pytest.fixture(scope="module", params=[granite, gemma2])
def target(request):
    return request.param()


@pytest.mark.parametrize(
    "make",
    [random_head, lambda target: random_eagle3(target, layer="llama")],
    ids=["eagle", "eagle3"],
)
def test_the_loss_of_a_training_step_is_to_the_targets_own_distribution(target, make):
    tokens = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(0))
    head = make(target).requires_grad_(True)
    module = HeadModule(
        head,
        HeadConfig(loss=TalfLoss(depth=1), features="three" if head.feature_layers else "final"),
    )
    loss, figures = module.loss(batch_of(tokens), 0)
    p = target.module(tokens, use_cache=False).logits.detach()[:, 1:-1].softmax(-1)
    features = target_features(target, tokens, None, layers=head.feature_layers)[1]
    q = head.logits(head.tree_features(tokens, features, torch.tensor([1]), [])[0][:, :-1])
    expected = F.cross_entropy(q.flatten(0, 1), p.flatten(0, 1))
    torch.testing.assert_close(figures["loss_depth_0"], expected.detach())
    for weight in head.parameters():
        one, other = (
            torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (loss, expected)
        )
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=1e-4)


def test_an_exported_head_says_the_scale_that_vllm_reads(tmp_path):
    def config(head, name):
        return json.loads((save_head(head, tmp_path / name) / "config.json").read_text())

    assert config(random_head(granite()), "granite")["logit_scale"] == 0.25
    assert "logit_scale" not in config(
        random_eagle3(granite(), layer="llama"), "eagle3"
    )  # its own lm_head holds it
    assert config(random_head(gemma2()), "gemma2")["attn_logit_softcapping"] is None
