"""Every family's layer is one function in training and in decoding, and comes back from disk beside
its own target only.
"""

import json

import pytest
import torch
from torch import nn

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.families import not_for_vllm
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.head_drafter import EagleDrafter
from tests.draft_training.heads import FAMILIES, family_target, random_head, tiny_target
from tests.draft_training.one_by_one import branch_by_branch, plain_path, random_levels

OTHERS = [family for family in FAMILIES if family != "llama"]


@pytest.fixture(scope="module", params=OTHERS)
def target(request):
    return family_target(request.param)


def features_of(target, tokens):
    with torch.no_grad():
        return target.hidden(
            tokens, torch.arange(tokens.shape[1])[None].expand(len(tokens), -1), None, None
        )


@torch.no_grad()
def test_training_forward_of_trees_is_decoding_forward_branch_by_branch(target):
    head, tokens = (
        random_head(target),
        torch.randint(29, (2, 7), generator=torch.Generator().manual_seed(0)),
    )
    features, roots, levels = (
        features_of(target, tokens),
        torch.tensor([1, 6]),
        random_levels(2, 2, 2, 3, 29),
    )
    assert head.family.name == target.name
    trees = head.tree_features(tokens, features, roots, levels)
    for ours, theirs in zip(
        trees, branch_by_branch(head, tokens, features, roots, levels), strict=True
    ):
        size = theirs.abs().max()
        torch.testing.assert_close(ours / size, theirs / size, atol=1e-5, rtol=0)


def test_gradients_of_trees_are_those_of_each_path_run_alone(target):
    head, tokens = (
        random_head(target),
        torch.randint(29, (1, 6), generator=torch.Generator().manual_seed(0)),
    )
    features, root, levels = features_of(target, tokens), 4, random_levels(1, 1, 2, 2, 29)
    outputs = head.tree_features(tokens, features, torch.tensor([root]), levels)[-1]
    weights = torch.randn(1, 1, 2, target.hidden_size, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((outputs * weights).sum(), list(head.parameters()))
    total = 0.0
    for node in range(2):
        parent = levels[1].parents[0, 0, node]
        path = torch.stack([levels[0].tokens[0, 0, parent], levels[1].tokens[0, 0, node]])
        output = plain_path(head, torch.cat([tokens[0, : root + 1], path]), features[0], 2)
        total = total + (output * weights[0, 0, node]).sum()
    for mine, reference in zip(
        ours, torch.autograd.grad(total, list(head.parameters())), strict=True
    ):
        scale = reference.abs().max().clamp(min=1)
        torch.testing.assert_close(mine / scale, reference / scale, atol=1e-5, rtol=1e-5)


def test_decoding_with_the_exported_head_is_greedy_decoding(target, tmp_path):
    head = random_head(target)
    drafter = EagleDrafter.from_pretrained(save_head(head, tmp_path / "head"), target)
    assert all(
        torch.equal(head.state_dict()[name], weight)
        for name, weight in drafter.head.state_dict().items()
    )
    prompt, greedy = [3, 1, 4, 1, 5], SamplingSetting(0.0)
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["specinfer"])
    decoder = SpeculativeDecoder(target, drafter, Delayed(Action(2, 1, 2)), VERIFIERS["specinfer"])
    expected = plain.generate(prompt, 24, greedy, Rng.seeded(0)).tokens
    assert decoder.generate(prompt, 24, greedy, Rng.seeded(0)).tokens == expected


def test_a_llama_layer_fits_beside_any_target(target, tmp_path):
    head = random_head(target, layer="llama")
    folder = save_head(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["model_type"] == "llama"
        and config["hidden_act"] == "silu"
        and not_for_vllm(head.family) is None
    )
    assert load_head(folder, target).family.name == "llama"


def test_a_qwen2_head_is_a_llama_layer_with_query_key_value_biases_for_vllm(tmp_path):
    folder = save_head(random_head(family_target("qwen2")), tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLM"]
        and config["qkv_bias"] is True
        and not config["attention_bias"]
    )


def test_layers_with_more_norms_say_that_vllm_cannot_hold_them():
    reasons = {family: not_for_vllm(EagleHead(family_target(family)).family) for family in FAMILIES}
    assert reasons["llama"] is None and reasons["qwen2"] is None
    assert "queries and keys" in reasons["qwen3"] and "after attention" in reasons["gemma3_text"]


def test_a_head_of_another_family_is_refused(tmp_path):
    one, other = family_target("qwen3"), family_target("qwen2")
    other.lm_head.weight.data.copy_(one.lm_head.weight)
    with pytest.raises(UserError, match="qwen3 layer"):
        load_head(save_head(random_head(one), tmp_path / "head"), other)
    with pytest.raises(UserError, match="another lm_head"):
        load_head(tmp_path / "head", family_target("qwen3", tied=True))


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_a_tied_lm_head_is_shared_like_any_other(family, tmp_path):
    target = family_target(family, tied=True)
    assert target.lm_head.weight is target.module.get_input_embeddings().weight
    test_decoding_with_the_exported_head_is_greedy_decoding(target, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_lm_head_is_refused():
    target = tiny_target()
    linear = nn.Linear(16, 29, bias=False)
    target.lm_head = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(linear), {nn.Linear}, torch.qint8
    )[0]
    with pytest.raises(UserError, match="quantised"):
        EagleHead(target)
    target = tiny_target()
    target.lm_head.weight.data = torch.zeros(29, 16, dtype=torch.int8)
    with pytest.raises(UserError, match="int8"):
        EagleHead(target)


def test_an_unknown_layer_is_refused():
    with pytest.raises(UserError, match="mamba"):
        EagleHead(tiny_target(), "mamba")


def test_a_target_whose_configuration_names_no_key_value_heads_has_a_head():
    """As published GPT-NeoX models do not."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {
        "vocab_size": 29,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    target = CausalModel(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, max_position_embeddings=64)))
    head = EagleHead(target)
    assert head.family.name == "llama" and head.config.num_key_value_heads == 2
    tokens = torch.tensor([[1, 2, 3]])
    assert (
        head.logits(
            head.tree_features(tokens, features_of(target, tokens), torch.tensor([1]), [])[0]
        ).shape[-1]
        == 29
    )
