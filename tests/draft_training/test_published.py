"""Heads in the layouts of EAGLE, EAGLE-3 and speculators decode here and start a training; what is
no such head is refused.
"""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nde_talf import CausalModel, EagleDrafter
from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.export.published_heads import LAYERS
from nde_talf.draft_training.training.head_training import build_head, fit_head
from nde_talf.draft_training.training_settings import HeadConfig, TalfLoss
from tests.draft_training.heads import random_eagle3, random_head, same, sizes, tiny_target
from tests.draft_training.test_training import close
from tests.refusal import refusal

TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=2), roots=2, steps=2, batch=2, warm_up=1, precision="32-true"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 32,
    "model_type": "llama",
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "vocab_size": 29,
    "max_position_embeddings": 256,
}  # fmt: skip


def publish(folder, weights, config, binary=False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    if binary:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


NORMED = ("norm_before_residual", "norm_before_fc", "norm_output")
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20}
KINDS = {  # how it is made, what its config.json adds, and what trains it on
    "eagle": (random_head, {}, {}),
    "eagle3": (
        partial(random_eagle3, vocabulary=[*range(3, 23)]),
        EAGLE3,
        {"features": "three", "draft_vocab": 20},
    ),
    "eagle31": (
        partial(random_eagle3, norms=NORMED),
        {"speculators_config": {}, "fc_norm": False, **dict.fromkeys(NORMED, True)},
        {"features": "three", "norms": [*NORMED]},
    ),
}


def written(kind, target):
    """Weights and config.json of a head; EAGLE's own are in half precision, with a copy of the
    target's embedding.
    """
    make, config, _ = KINDS[kind]
    weights = make(target).file_weights()
    if kind == "eagle":
        weights["embed_tokens.weight"] = target.module.get_input_embeddings().weight
        weights = {name: weight.half() for name, weight in weights.items()}
    return weights, CONFIG | config


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_loads_and_starts_a_training_which_exports_it(
    kind, target, rows, tmp_path
):
    make, _, settings = KINDS[kind]
    folder = publish(tmp_path / "head", *written(kind, target), binary=kind == "eagle")
    head = load_head(folder, target)
    assert close(head, make(target), 1e-3)  # EAGLE's own is in half precision
    assert EagleDrafter.from_pretrained(folder, target).vocab_size == target.vocab_size
    config = replace(TINY, warm_start=str(folder), chain_fraction=0.0, **settings)
    assert same(build_head(target, config), load_head(folder, target, torch.float32))
    trained = fit_head(target, rows, config, tmp_path / "training")
    again = load_head(save_head(trained, tmp_path / "export"), target)
    assert same(trained, again) and not same(trained, head)


def test_flags_of_norms_are_read_where_nvidia_writes_them(target, tmp_path):
    weights, config = written("eagle31", target)
    inside = {"eagle_config": {name: config.pop(name) for name in NORMED}}
    assert load_head(publish(tmp_path / "two", weights, config | inside), target).norms == NORMED


def test_sizes_of_its_own_and_a_bias_stay_with_the_head(target, tmp_path):
    head = random_head(target)
    wide = type(head)(
        target,
        sizes={
            "intermediate_size": 48,
            "fc_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    )
    config = {**CONFIG, "intermediate_size": 48, "rope_theta": 5e5}
    read = load_head(publish(tmp_path / "wide", wide.state_dict(), config), target)
    assert read.fc.bias is not None and read.layers[0].mlp.up_proj.out_features == 48
    assert not torch.equal(read.rotary.inv_freq, head.rotary.inv_freq)
    folder = save_head(read, tmp_path / "export")
    again = load_head(folder, target)
    assert same(read, again) and torch.equal(read.rotary.inv_freq, again.rotary.inv_freq)
    assert LlamaConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 5e5
    started = build_head(target, replace(TINY, warm_start=str(folder)))
    on = load_head(save_head(started, tmp_path / "on"), target)
    assert on.fc.bias is None and same(on, started)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_readers_without_rope_parameters_build_the_same_angles(tmp_path):
    config = LlamaConfig(**sizes(), rope_parameters=LLAMA3, tie_word_embeddings=False)
    target = CausalModel(LlamaForCausalLM(config), "llama")
    head = random_head(target)
    folder = save_head(head, tmp_path / "export")
    read = json.loads((folder / "config.json").read_text())
    older = {"rope_theta": read["rope_theta"], **read["rope_scaling"]}
    angles = LlamaRotaryEmbedding(LlamaConfig(**sizes(), rope_parameters=older))
    assert torch.equal(angles.inv_freq, head.rotary.inv_freq)
    assert LlamaConfig.from_pretrained(folder).rope_parameters == read["rope_parameters"]
    assert same(load_head(folder, target), head)


@pytest.mark.parametrize("norms,biases", [("qk", "qkvo"), ("", "qkv"), ("", "qkvo")])
@pytest.mark.parametrize("make", [random_head, random_eagle3])
def test_layers_of_qwen_and_biases_are_read_beside_any_target(
    target, tmp_path, make, norms, biases
):
    """As SpecForge, EAGLE and speculators publish them, whatever they call the layer."""
    weights = make(target).file_weights()
    before = next(name for name in weights if "q_proj" in name).removesuffix("q_proj.weight")
    own = {f"{name}_norm.weight": 4 for name in norms}
    own |= {f"{name}_proj.bias": len(weights[f"{before}{name}_proj.weight"]) for name in biases}
    weights |= {before + name: torch.rand(size) + 0.5 for name, size in own.items()}
    config = {**CONFIG, "head_dim": 4, "attention_bias": "o" in biases}
    read = load_head(publish(tmp_path / "head", weights, config), target)
    again = load_head(save_head(read, tmp_path / "export"), target)
    assert same(read, again) and again.family is read.family
    assert all(torch.equal(again.file_weights()[name], weights[name]) for name in weights)
    assert EagleDrafter(read).head.native is not None


def test_a_head_may_take_other_layers_than_eagle3s(tmp_path):
    target = tiny_target(layers=4)
    weights, config = written("eagle31", target)
    for layers in ([0, 1, 2], [1, 3, 4], [2, 1, 0], [0, 1, 1], [0, 1], [1, 2, 99]):
        folder = publish(tmp_path / f"{layers}", weights, config | {LAYERS: layers})
        if layers in ([0, 1, 2], [1, 3, 4]):
            assert load_head(folder, target).feature_layers == tuple(layers)
        else:
            with refusal("three in ascending order"):
                load_head(folder, target)
    nested = {"eagle_config": {LAYERS: [1, 2, 3]}}  # SpecForge's: outputs of layers, from 0
    folder = publish(tmp_path / "nested", weights, config | nested)
    assert load_head(folder, target).feature_layers == (2, 3, 4)


def test_speculators_layout_is_read(target, tmp_path):
    weights, config = written("eagle3", target)
    folder = publish(tmp_path / "eagle3", weights, config)
    weights = {name.replace("midlayer.", "layers.0."): w for name, w in weights.items()}
    weights["embed_tokens.weight"] = target.module.get_input_embeddings().weight.detach()
    del weights["t2d"]
    config = {"speculators_model_type": "eagle3", "speculators_config": {}} | EAGLE3
    config |= {"transformer_layer_config": CONFIG}
    one = publish(tmp_path / "one", weights, config)
    assert same(load_head(one, target), load_head(folder, target))


OTHER = tiny_target(seed=5).module.get_input_embeddings().weight
WIDE = random_head(tiny_target(hidden=32)).state_dict()
UP = "layers.0.mlp.up_proj.weight"
FAULTS = {  # of which kind of head, with which weights and keys, and what is named
    "another embedding": ("eagle", {"embed_tokens.weight": OTHER}, {}, "another target"),
    "another width": ("eagle", WIDE, {}, r"fc\.weight is \[32, 64\].*another target"),
    "a missing weight": ("eagle", {UP: None}, {}, "Missing key"),
    "a LoRA adapter": ("eagle", {}, {}, r"config\.json"),
    "no weights": ("eagle", {}, {}, r"model\.safetensors or pytorch_model\.bin"),
    "a norm of three": ("eagle", {}, {"norm_output": True}, "norm_output"),
    "no norm": ("eagle31", {}, {"norm_before_fc": False}, r"input_norm\.weight"),
    "a norm more": ("eagle31", {}, {"fc_norm": True}, r"fc_norm\.0\.weight"),
    "no flag": ("eagle31", {}, {"norm_output": "yes"}, r"config\.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_head_for_the_target_is_refused(target, tmp_path, fault):
    kind, weights, keys, words = FAULTS[fault]
    whole, config = written(kind, target)
    whole = {name: weight for name, weight in (whole | weights).items() if weight is not None}
    folder = publish(tmp_path / "bad", whole, config | keys)
    if fault == "a LoRA adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")
    elif fault == "no weights":
        (folder / "model.safetensors").unlink()
    with refusal(words):
        load_head(folder, target)
