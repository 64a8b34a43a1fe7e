"""Stage latency refuses a table measured under load, and stage selector one that cannot be trusted
or is of another pair.
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from nde_talf import LatencyTable
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.pipelines.config.schema import TABLE, Config, EvaluationConfig, LatencyConfig
from nde_talf.pipelines.runs.manifest import write_manifest
from nde_talf.pipelines.runs.run_models import load_drafted
from nde_talf.pipelines.stages import evaluate, latency
from nde_talf.pipelines.stages.selector import latency_table
from nde_talf.selector.selector_settings import SelectorConfig
from tests.decoding.pairs import tiny_pair
from tests.refusal import refusal
from tests.selector.examples import TABLE as QUIET


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pair of random weights, and an empty folder for its latency table."""
    root = tmp_path_factory.mktemp("run")
    for role, model in zip(("target", "draft"), tiny_pair(29), strict=True):
        model.module.save_pretrained(root / "pair" / role)
    prompts = [Prompt(f"p{i}", "text", f"words {i}", [i, i + 1, i + 2]) for i in range(3)]
    rows = torch.arange(48).reshape(8, 6) % 29
    Pair(root / "pair").write("target", "draft", prompts, 1, rows, rows)
    write_manifest(
        root / "pair",
        {"settings": {}, "inputs": {}},
        {"overlap": {"1.0": 0.7}, "kl": torch.nan},
        0.0,
    )
    (root / "latency").mkdir()
    return {name: root / name for name in ("pair", "latency")}


def of_this_test(**latency):
    asked = LatencyConfig([16], 1, **latency)
    return Config(traces=TracesConfig(new_tokens=8), latency=asked)


def table_of(config, folders, models):
    asked, trained_here = config.latency, not config.model.target
    return latency_table(config.selector.table, folders["latency"], models, asked, trained_here)


@pytest.mark.slow
def test_the_stage_refuses_repeats_that_disagree_and_a_key_accepts_them(folders, monkeypatch):
    monkeypatch.setattr("nde_talf.selector.prices.AGREE", 0.0)  # no two measurements are equal
    monkeypatch.setattr("nde_talf.selector.profiling.MAX_BATCHES", 2)
    monkeypatch.setattr("nde_talf.pipelines.stages.latency.AGREE", 0.0)
    refusing, path = of_this_test(accept_noise=False), folders["latency"] / TABLE
    with refusal(r"table\.json.*under load.*latency\.accept_noise=true"):
        latency.work(refusing, folders, Mock())
    assert not path.exists()
    config = of_this_test(accept_noise=True)
    metrics = latency.work(config, folders, Mock())
    table = LatencyTable.load(path)
    assert metrics["disagreement"] == table.disagreement > 0 and set(table.verify) == set(
        config.traces.verifiers
    )
    assert latency.settings(config) == latency.settings(
        of_this_test()
    )  # so the finished stage stays finished
    with refusal("under load"):
        table_of(refusing, folders, load_drafted(refusing, folders))
    models = load_drafted(config, folders)
    for accepting in (config, of_this_test()):
        assert table_of(accepting, folders, models) == table
    unsaid = of_this_test().latency
    assert unsaid.accepts_noise(True) and not unsaid.accepts_noise(False)


def test_a_selector_is_trained_on_no_table_of_another_pair(folders, tmp_path):
    own = SelectorConfig(table=str(tmp_path / "own.json"))
    config = replace(of_this_test(), selector=own)
    QUIET.save(tmp_path / "own.json")
    assert table_of(config, folders, load_drafted(config, folders)) == QUIET
    replace(QUIET, models={"draft": [8, 3, 29]}).save(tmp_path / "own.json")
    with refusal(r"own\.json.*its draft has .*\(8, 3, 29\).*another pair"):
        table_of(config, folders, load_drafted(config, folders))


@pytest.mark.parametrize("asked,seconds,count", [(None, 0.01, 16), (30, 1, 30)])
def test_a_slow_machine_decodes_fewer_prompts_unless_told_how_many(tmp_path, asked, seconds, count):
    evaluation = EvaluationConfig(prompts=asked)
    replace(QUIET, autoregressive=[seconds] * len(QUIET.contexts)).save(tmp_path / TABLE)
    assert evaluate._affordable(evaluation, tmp_path, 8) == count
