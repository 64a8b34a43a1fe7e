"""Finished work is known by what was made, and is kept where newer work replaces it."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.draft_training.model.families import NoHeadError, family_named
from nde_talf.pipelines.config.schema import Config, ModelConfig
from nde_talf.pipelines.runs.finished import COMMAND
from nde_talf.pipelines.runs.manifest import BEGUN, MANIFEST
from nde_talf.pipelines.stages import draft, pair
from nde_talf.pipelines.stages.traces import chosen_engine
from tests.pipelines.chain import Chain
from tests.refusal import refusal


@pytest.fixture
def chain(tmp_path):
    chain = Chain(tmp_path)
    assert chain.run() == ["pair", "traces", "selector"]
    return chain


def edit(path, **changes):
    path.write_text(json.dumps({**read_json(path), **changes}))


@pytest.mark.parametrize("part", ["settings", "inputs", "artefacts", "metrics"])
def test_a_manifest_that_says_what_was_not_made_is_refused_and_nothing_is_removed(chain, part):
    before = chain.made()
    edit(chain.path("traces", MANIFEST), **{part: {"pair": "0"}})
    with refusal(r"traces/manifest\.json: it is not as it was written"):
        chain.run()
    assert chain.made() == before and not chain.kept()


def test_an_earlier_stage_made_again_to_the_same_bytes_changes_nothing(chain):
    assert chain.run("pair", force=True) == ["pair"]
    assert chain.run() == [] and chain.kept() == ["pair"]


def test_force_keeps_what_it_replaces_and_goes_on_after_a_kill(chain):
    chain.text, chain.fails = "again", "traces"
    before = chain.made()["traces"]
    with pytest.raises(KeyboardInterrupt):
        chain.run("traces", force=True)
    chain.fails = ""
    assert chain.run("traces") == ["traces"]  # without force it goes on
    assert "again" in chain.made()["traces"]
    (old,) = chain.path("replaced").glob("traces-*")
    assert (old / "made.txt").read_text() == before


def test_later_stages_are_made_again_and_the_old_ones_are_kept(chain, capsys):
    before = chain.made()
    chain.text = "again"
    chain.run("pair", force=True)
    assert chain.made()["traces"] == before["traces"]
    chain.fails = "traces"
    with pytest.raises(KeyboardInterrupt):
        chain.run()
    assert chain.kept() == ["pair", "traces"]
    chain.fails = ""
    assert chain.run() == ["traces", "selector"]
    assert all("again" in text for text in chain.made().values())
    assert chain.kept() == ["pair", "selector", "traces"]
    old = next(chain.path("replaced").glob("traces-*"))
    assert (old / "made.txt").read_text() == before["traces"] and (old / MANIFEST).exists()
    assert "what was there is kept in" in " ".join(capsys.readouterr().out.split())
    assert chain.run() == []


def test_other_settings_are_named_and_nothing_is_removed(chain):
    before = chain.made()
    with refusal("seed: 1 recorded, 2 given"):
        chain.run("selector", seed=2)
    with refusal("seed: 1 recorded, 2 given"):
        chain.run(seed=2)
    assert chain.made() == before


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_text("damaged"), lambda path: path.unlink()]
)
def test_a_damaged_file_is_named_by_its_own_stage_and_by_the_next(chain, damage):
    damage(chain.path("traces", "made.txt"))
    for stage in ("traces", "selector"):
        with refusal(r"traces/made\.txt: it is .*stage=traces force=true"):
            chain.run(stage)
    with refusal(r"traces/made\.txt"):
        chain.run()
    assert chain.run("traces", force=True) == ["traces"] and chain.run() == []


def test_what_was_begun_with_inputs_of_before_starts_again(tmp_path, capsys):
    chain = Chain(tmp_path, fails="selector")
    with pytest.raises(KeyboardInterrupt):
        chain.run()
    chain.text, chain.fails = "again", ""
    chain.run("pair", force=True)
    assert chain.run() == ["traces", "selector"]
    assert "again" in chain.made()["selector"]
    assert "so this one is too" in " ".join(capsys.readouterr().out.split())
    # what was begun of the selector is days of work, perhaps
    assert chain.kept() == ["pair", "selector", "traces"]


def test_a_base_runs_stages_are_used_and_never_touched(chain):
    before = chain.made()
    chain.text = "second"
    assert chain.run("selector", run="second", base="default") == []
    chain.path("traces", "made.txt").write_text("damaged")
    with refusal(r"traces/made\.txt"):
        chain.run("selector", run="second", base="default")
    chain.path("traces", "made.txt").write_text(before["traces"])
    assert chain.run("selector", force=True, run="second", base="default") == ["selector"]
    assert chain.made() == before


def test_a_base_of_a_base_is_followed(chain):
    chain.run("selector", force=True, run="second", base="default")
    runs = chain.path().parent
    for run, base in (("second", "default"), ("default", "third")):  # in a circle
        write_json(runs / run / COMMAND, {"base": base, "arguments": []})
    assert chain.run("selector", run="third", base="second") == []
    assert chain.run("traces", run="third", base="second") == []


def test_an_unfinished_stage_whose_beginning_is_damaged_says_what_to_delete(tmp_path):
    chain = Chain(tmp_path, fails="pair")
    with pytest.raises(KeyboardInterrupt):
        chain.run("pair")
    chain.path("pair", BEGUN).write_text("{}")
    with refusal(r"(?s)begun.json.*Field required.*delete .*pair"):
        chain.run("pair")


def test_a_pair_for_the_cpu_is_trained_there_beside_a_gpu(tmp_path, monkeypatch):
    trained, text = [], Mock(tokenizer=train_tokenizer(["a"], 300))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(pair, "fit", lambda module, *_: trained.append(module) or module.model)
    pair._train(Config(), tmp_path, text, Mock())
    assert [module.place.type for module in trained] == ["cpu", "cpu"]


def test_a_target_over_several_devices_has_no_head_and_is_torchs(monkeypatch):
    config = Config(model=ModelConfig(device_map="auto"))
    with pytest.raises(NoHeadError):
        draft.work(config, {}, Mock())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "vllm")
    places = ("cuda", "auto"), ("cuda", None), ("cuda:1", None)
    models = [ModelConfig(device=device, device_map=spread) for device, spread in places]
    names = [chosen_engine(config.engine, model).name for model in models]
    assert names == ["transformers", "vllm", "transformers"]
    with refusal("CUDA_VISIBLE_DEVICES"):
        chosen_engine(replace(config.engine, name="vllm"), models[2])


def test_a_head_that_vllm_has_no_layer_for_is_told(capsys):
    for layer in ("family", "llama"):
        draft.tell_engines(Mock(family=family_named("qwen3", layer)))
    assert capsys.readouterr().out.count("vLLM's EAGLE") == 1
