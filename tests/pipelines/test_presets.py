"""The presets of the papers' pairs: they compose, their models are those that were published, their
miniatures run, and what they cost is computed without a hub.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nde_talf.data.traces.budget import cache_bytes
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines import costs
from nde_talf.pipelines.checks import check_config
from nde_talf.pipelines.dry_run import PUBLISHED, model_config, pair_sizes, rows, sizes
from nde_talf.pipelines.run import run
from tests.pipelines.miniatures import ROWS, WINDOW, composed, from_pair_to_report, presets, shrink

PRESETS = presets()
PARAMETERS = {
    "meta-llama/Meta-Llama-3-70B-Instruct": 70_553_706_496,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "google/gemma-3-270m-it": 268_098_176,
    "facebook/opt-350m": 331_196_416,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "JackFram/llama-68m": 68_030_208,
}
"""Of the published checkpoints."""
KV_BYTES = {"llama3_70b_8b": 327_680, "gemma3_27b_270m": 507_904, "qwen2.5_32b_0.5b": 262_144}
"""Of a token of the target, in bfloat16: 2 x layers x kv heads x head size x 2 bytes."""


def published(path: Path):
    return AutoConfig.for_model(**json.loads(path.read_text()))


def test_the_presets_of_all_papers_are_there():
    assert len(PRESETS) == 11 and {"llama3_70b_8b", "llama2_7b"} <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_composes_and_passes_every_check(preset):
    config = composed(f"model={preset}")
    check_config(config)
    for name in (config.model.target, config.model.draft):
        assert name is None or (PUBLISHED / f"{name.replace('/', '--')}.json").is_file()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_configuration_has_the_checkpoints_number_of_parameters(name):
    own = sizes(model_config(name, "model.target"), "bfloat16", name)
    assert own.divided + own.replicated == PARAMETERS[name]


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_a_miniature_has_its_models_peculiarities(path):
    full = published(path)
    small = shrink(full, ROWS + 64)
    model = AutoModelForCausalLM.from_config(small)
    assert type(small) is type(full) and type(model).__name__ == full.architectures[0]
    assert model.get_output_embeddings().weight.shape[0] == ROWS + 64
    assert sum(weight.numel() for weight in model.parameters()) < 300_000
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    full, small = full.get_text_config(), small.get_text_config()
    assert tied == full.tie_word_embeddings
    assert set(getattr(small, "layer_types", ())) == set(getattr(full, "layer_types", ()))
    if "sliding_attention" in getattr(full, "layer_types", ()):
        assert small.sliding_window == WINDOW
    kinds = [
        json.dumps(own.to_dict().get("rope_parameters"), sort_keys=True).count("rope_type")
        for own in (full, small)
    ]
    assert kinds[0] == kinds[1]
    grouped = [
        own.num_attention_heads > getattr(own, "num_key_value_heads", own.num_attention_heads)
        for own in (full, small)
    ]
    assert grouped[0] == grouped[1]
    with torch.no_grad():
        assert model(input_ids=torch.arange(40)[None]).logits.isfinite().all()


@pytest.mark.parametrize("preset", KV_BYTES)
def test_a_token_of_the_targets_cache(preset):
    assert cache_bytes(pair_sizes(composed(f"model={preset}"))[0]) == KV_BYTES[preset]


def test_tensor_parallelism_divides_what_the_models_plan_names():
    target = pair_sizes(composed("model=llama3_70b_8b"))[0]
    norms = (2 * 80 + 1) * 8192
    assert target.replicated == 2 * 128_256 * 8192 + norms  # embedding, output layer and norms
    assert target.weights(4) == (target.divided / 4 + target.replicated) * 2
    assert target.divides(8) and not target.divides(16)  # of 8 key and value heads
    assert not pair_sizes(composed("model=opt_6.7b_125m"))[0].divides(2)  # OPT has no plan


def test_more_gpus_take_less_memory_each_and_less_time():
    config = composed("model=llama3_70b_8b")
    pair = pair_sizes(config)
    one, four = (costs.stage_memory(config, *pair, ranks) for ranks in (1, 4))
    assert all(four[stage] < one[stage] for stage in one) and set(one) == {
        "latency, evaluate",
        "traces",
        "draft",
    }
    assert [costs.gpus_needed(config, *pair, 1e9 * memory) for memory in (20, 80, 141)] == [
        None,
        4,
        2,
    ]
    spent = [
        sum(costs.trace_seconds(config, *pair, costs.gpus("H100", count)).values())
        for count in (2, 4)
    ]
    assert spent[1] < spent[0] < 2.2 * spent[1]


def test_a_dry_run_prints_its_figures_without_a_hub_and_makes_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("nde_talf.decoding.common.progress.console.width", 160, raising=False)
    config = composed(
        "model=qwen2.5_32b_0.5b", "dry_run=true", f"paths.checkpoints={tmp_path}/runs"
    )
    run(config)
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "65.5 GB",
        "computed, not run",
        "512,000 roots",
        "GPU hours",
        "peak memory, draft",
        "disk of stage selector",
    ):
        assert part in printed, printed
    assert not (tmp_path / "runs").exists()


def test_quantised_weights_are_priced_at_their_own_bytes(tmp_path):
    config = model_config("Qwen/Qwen2.5-0.5B-Instruct", "model.target")
    plain = sizes(config, "bfloat16", "somewhere")
    matrices = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    for said, each in (
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 0.5 + 2 / 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1 + 2 / 128),
        ({"quant_method": "fp8"}, 1 + 2 / 128),
    ):
        config.quantization_config = said
        found = sizes(config, "bfloat16", "somewhere")
        assert found.weights() == pytest.approx(plain.weights() - matrices * (2 - each))
        assert plain.divides(2) and not found.divides(2)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert sizes(config, "bfloat16", str(tmp_path)).weights() == 1000


def test_a_head_alone_has_no_traces():
    config = composed("model=llama2_7b")
    lines = dict(rows(config, *pair_sizes(config)))
    assert "peak memory, draft" in lines and not [name for name in lines if "traces" in name]


def test_the_pair_that_would_be_trained_here_is_computed_too():
    target, draft = pair_sizes(composed("model=tiny_ci"))
    assert target.divided and draft.weights() < target.weights() < 10e6


def test_a_model_without_a_configuration_is_refused_by_key(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        UserError, match=r"model\.target=nobody/nothing: its configuration could not be read"
    ):
        pair_sizes(composed("model.target=nobody/nothing", "model.draft=nobody/nothing"))


SOME = ("llama2_7b", "qwen2.5_32b_0.5b")


@pytest.mark.slow
@pytest.mark.pipeline
@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in PRESETS],
)
def test_a_presets_miniature_goes_from_pair_to_report(preset, tmp_path):
    assert "report" in from_pair_to_report(preset, tmp_path)
    assert (tmp_path / "runs/default/report/index.html").is_file()


@pytest.mark.parametrize(
    "content, message",
    [
        ({"model_type": "t5", "d_model": 64, "num_layers": 2}, "no causal language model"),
        ({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}, "recurrent state"),
        ({"model_type": "llama", "hidden_size": "many"}, "configuration could not be read"),
        (
            {"model_type": "llama", "hidden_size": 64, "hidden_act": "none such"},
            "no causal language model",
        ),
    ],
)
def test_a_model_that_cannot_be_used_has_no_sizes(tmp_path, content, message):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        sizes(model_config(str(tmp_path), "model.target"), "bfloat16", str(tmp_path))
