"""Minutes of stages from counted work and prices."""

import pytest

from nde_talf.pipelines.commands.dry_run import expected
from nde_talf.pipelines.commands.estimate import Size, Work, minutes, works
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.run import run
from tests.pipelines.micro import ROOT
from tests.refusal import refusal

SMOLLM2 = Size(134_515_008, 31_851_000)
PAIR = ROOT / "tests/fixtures/pair"


def test_work_times_prices_gives_minutes():
    assert minutes(Work(6000, 60, 30, 5), Work(0.01, 0.5, 1, 1)) == pytest.approx(125 / 60)


def test_steps_of_a_head_cost_as_measured_on_smollm2():
    """275 tokens a second with chains, of which the target takes 51 to 60 %, and 182 with trees."""
    asked = ["draft.steps=1", "model.length=512", "model.target=x"]
    parts = (composed(Config, *asked, f"draft.chain_fraction={part}") for part in (1, 0))
    chains, trees = (works(config, SMOLLM2)["draft"].row for config in parts)
    assert 1 / 0.60 < chains / (1.1 * 4 * 512) < 1 / 0.51
    assert trees / chains == pytest.approx(275 / 182, rel=0.05)


def test_measured_and_computed_prices_are_of_one_order(tmp_path):
    pair = [f"model.{role}={PAIR}/{role}" for role in ("target", "draft")]
    config = composed(Config, *pair, f"paths.checkpoints={tmp_path}", "stage=evaluate")
    (measured, how), (computed, other) = expected(config, measure=True), expected(config)
    assert "timed" in how and "not measured" in other
    assert [*measured] == [*computed] == ["evaluate"]
    assert min(measured.values()) > 0 < min(computed.values())


def test_a_long_stage_says_so_when_it_begins(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    long = ["model=tiny_ci", "model.target_lm.steps=10000000", "tracking=disabled", "data=text"]
    places = [f"data.source={tmp_path}/empty.txt", f"paths.checkpoints={tmp_path}"]
    with refusal():
        run(composed(Config, *long, *places))
    printed = " ".join(capsys.readouterr().out.split())
    assert "! pair: about " in printed and "evaluate: about" not in printed


def test_folders_that_no_run_can_have_and_names_of_none_are_refused_first(tmp_path):
    (tmp_path / "file").touch()
    for place in ("/proc/runs", tmp_path / "file"):
        with refusal("paths.checkpoints"):
            run(composed(Config, f"paths.checkpoints={place}"))
    with refusal("stage=traces needs what stage=pair makes"):
        run(composed(Config, "run=typo", "stage=traces", f"paths.checkpoints={tmp_path}"))
    assert not (tmp_path / "typo").exists()
