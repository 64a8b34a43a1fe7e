"""A model folder is loaded whole or refused: nothing in it is filled with random numbers, and
nothing of it is NaN.
"""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from nde_talf import CausalModel
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.checksums import CHECKSUMS, write_checksums
from nde_talf.decoding.common.errors import Advice
from nde_talf.decoding.models.loading import foreign_names, load_module
from tests.decoding.families import FAMILIES, family, module
from tests.refusal import refusal


def build(name, tied=False):
    kind, changes = FAMILIES[name]
    return module(kind, changes | {"tie_word_embeddings": tied})


@pytest.fixture
def folder(tmp_path):
    build("llama", False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, change):
    """Change the weights of a folder, a dict of tensors, in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "pythia", "opt"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_loads_with_its_weights_tied_or_not(tmp_path, family, tied):
    model = build(family, tied)
    model.save_pretrained(tmp_path)
    loaded = CausalModel.load(tmp_path).module.state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in model.state_dict().items())
    last = sorted(load_file(tmp_path / "model.safetensors"))[-3]
    edit(tmp_path, lambda weights: weights.pop(last))
    with refusal(rf"{last} .*missing"):
        CausalModel.load(tmp_path)


def spoil(**tensors):
    """Fill tensors of a folder with a number; None leaves the tensor out."""

    def change(weights):
        for name, value in tensors.items():
            weights.pop(name) if value is None else weights[name].fill_(value)

    return lambda folder: edit(folder, change)


def add(**tensors):
    return lambda folder: edit(folder, lambda weights: weights.update(tensors))


def half(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_a_shard(folder):
    build("llama").save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    max(folder.glob("*.safetensors")).unlink()


def only_gguf(folder):
    (folder / "config.json").unlink()
    (folder / "model.Q4.gguf").touch()


def adapter(folder):
    settings = json.dumps({"base_model_name_or_path": "org/name"})
    (folder / "adapter_config.json").write_text(settings)


UP = "model.layers.1.mlp.up_proj.weight"
REFUSED = {
    "no head": (spoil(**{"lm_head.weight": None}), r"random numbers.*lm_head\.weight are missing"),
    "a layer too many": (
        lambda folder: configure(folder, num_hidden_layers=3),
        r"model\.layers\.2\..* and 5 more are missing",
    ),
    "a layer too few": (
        lambda folder: configure(folder, num_hidden_layers=1),
        r"model\.layers\.1\..* belong to another architecture",
    ),
    "another shape": (
        lambda folder: configure(folder, intermediate_size=64),
        r"mlp\.down_proj\.weight \(32, 48\), not \(32, 64\).* have another shape",
    ),
    "NaN": (spoil(**{UP: torch.nan}), r"up_proj\.weight hold NaN, infinite or huge numbers"),
    "a reward model": (
        lambda folder: configure(folder, architectures=["LlamaForSequenceClassification"]),
        "is a LlamaForSequenceClassification, which scores texts and writes none",
    ),
    "a head of scores": (add(**{"v_head.summary.weight": torch.ones(1, 32)}), r"v_head\.summary"),
    "half a download": (half, "not fully covered.* download the model again"),
    "a missing shard": (without_a_shard, "No such file.* download the model again"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "o file named.* download the model again",
    ),
    "an adapter": (adapter, "a LoRA adapter for org/name.* merge_and_unload"),
    "GGUF": (only_gguf, r"it holds GGUF.* such as .*model\.Q4\.gguf"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_folder_with_a_fault_is_refused_by_its_weights(folder, fault):
    change, words = REFUSED[fault]
    change(folder)
    with refusal(rf"model\.draft=.*{words}"):
        CausalModel.load(folder, name="model.draft")


def test_what_belongs_to_a_larger_model_around_it_is_no_fault(folder):
    def add(weights):
        weights["vision_tower.layers.0.weight"] = torch.ones(3)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit(folder, add)
    with pytest.warns(Advice, match=r": vision_tower\.layers\.0\.weight are in its files"):
        CausalModel.load(folder)
    names = [
        "h.0.attn.bias",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.h.2.ln_1.weight",
        "score.weight",
    ]
    assert foreign_names(build("gpt2", True), names) == names[1:]


@pytest.mark.parametrize(
    "fault,words",
    [
        ("can't allocate memory", "there is no memory for its first passes"),
        ("addmm not implemented for Float8", r"it cannot run a token \(addmm"),
    ],
)
def test_a_pass_that_fails_is_told_by_its_cause(fault, words):
    def fail(*_):
        raise RuntimeError(fault)

    model = build("llama")
    model.model.norm.register_forward_hook(fail)
    with refusal(f"its name.*{words}"):
        CausalModel(model, "its name")


def test_the_hub_out_of_reach_and_a_faulty_configuration_are_no_fault_of_the_tokenizer(folder):
    configure(folder, rope_parameters={"rope_type": "yarn"})
    for where, words in ((folder, "'factor'"), ("org/nowhere", "hub cannot be reached")):
        for load in (CausalModel.load, load_tokenizer):
            with refusal(words) as told:
                load(where)
            assert "Save the tokenizer" not in str(told.value)


def test_numbers_that_are_too_large_for_their_type_are_refused(folder):
    spoil(**{UP: 1e6})(folder)
    CausalModel.load(folder)
    with refusal(r"infinite or huge numbers \(as float16\)"):
        CausalModel.load(folder, dtype="float16")


def test_weights_that_no_gpu_has_room_for_are_refused(folder):
    load = load_module
    with refusal("have no room"):
        load.__wrapped__(folder, "cpu", "float32", "model.target", {"": "meta"})


def test_a_model_with_checksums_is_checked_and_one_without_is_not(folder):
    write_checksums(folder)
    CausalModel.load(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with refusal(r"model\.safetensors is not as it was written"):
        CausalModel.load(folder)
    (folder / CHECKSUMS).unlink()
    CausalModel.load(folder)


@pytest.mark.skipif(find_spec("optimum") is not None, reason="optimum is installed here")
def test_a_quantised_checkpoint_whose_library_is_missing_is_refused_with_its_name(folder):
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with refusal(r"model\.target=.*quantised, and a library .*optimum.* Install it"):
        CausalModel.load(folder, name="model.target")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-images", "mistral-3", "gpt-oss", "gemma-2"])
def test_language_models_inside_others_and_of_eager_attention_load_from_a_folder(tmp_path, name):
    model = family(name)
    model.module.save_pretrained(tmp_path)
    loaded = CausalModel.load(tmp_path)
    ids = torch.arange(30)[None]
    assert torch.equal(loaded.module(ids).logits, model.module(ids).logits)
    assert len(loaded.body.layers) == loaded.layers == 2
    assert loaded.module.config._attn_implementation == (
        "eager" if name in ("gpt-oss", "gemma-2") else "sdpa"
    )


def test_a_read_out_that_the_configuration_does_not_tell_is_refused_with_the_difference(folder):
    model = build("llama", False)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.clamp(max=0.1))
    model.config.final_logit_softcapping = 0.5
    with refusal(r"its name: its logits differ by up to [\d.e-]+ from .*scale 1, soft cap 0\.5"):
        CausalModel(model, "its name")


def test_flash_attention_and_a_body_without_a_head_are_refused():
    model = build("llama")
    with refusal(r"model=LlamaModel: .*AutoModelForCausalLM"):
        CausalModel(model.model)
    model.config._attn_implementation = "flash_attention_2"
    with refusal("its attention is flash_attention_2, which takes no mask"):
        CausalModel(model)
