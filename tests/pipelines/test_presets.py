"""Every preset composes and passes the checks; a dry run says what it needs and makes nothing."""

import pytest

from nde_talf.pipelines.commands.dry_run import pair_without_weights
from nde_talf.pipelines.config.checks import check_config
from nde_talf.pipelines.config.command_line import composed, presets
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.run import run
from tests.pipelines import miniatures
from tests.pipelines.micro import ROOT

PAIR = ROOT / "tests/fixtures/pair"
GROUPS = ("model", "data", "traces", "selector", "draft", "dialogues", "evaluation", "tracking")
SOME = ("llama2_7b", "qwen2.5_32b_0.5b")
GIVEN = {"text": "data.source=pydoc", "file": "data.sets.file.source=README.md"}
"""What some presets of `data` leave to the user."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "group,name", [(group, name) for group in GROUPS for name in presets(group)]
)
def test_a_preset_composes(group, name):
    """Those of models pass every check; others are parts of a run."""
    asked = [f"{group}={name}"]
    if group == "data":
        asked += [GIVEN[name]] if name in GIVEN else []
    if (group, name) == ("dialogues", "file"):
        asked.append("dialogues.source=README.md")
    config = composed(Config, *asked)
    if group == "model":
        check_config(config)


def test_a_dry_run_prints_its_figures_and_makes_nothing(tmp_path, capsys):
    config = composed(Config, "model=tiny_ci", "dry_run=true", f"paths.checkpoints={tmp_path}/runs")
    run(config)
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("computed, not run", "parameters", "traces on disk", "free in"):
        assert part in printed, printed
    assert not (tmp_path / "runs").exists()
    models = pair_without_weights(config.model)
    assert models["draft"].num_parameters() < models["target"].num_parameters() < 10e6


@pytest.mark.long
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.nightly)
        for name in miniatures.presets()
    ],
)
def test_a_presets_miniature_goes_from_pair_to_report(preset, tmp_path):
    assert "report" in miniatures.from_pair_to_report(preset, tmp_path)
    assert (tmp_path / "runs/default/report/index.html").is_file()
