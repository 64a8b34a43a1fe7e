"""Minutes of stages from counted work and prices."""

import pytest

from nde_talf.pipelines.commands.dry_run import expected
from nde_talf.pipelines.commands.estimate import Size, Work, minutes, works
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from tests.pipelines.micro import ROOT

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


def test_a_stage_takes_some_time():
    pair = [f"model.{role}={PAIR}/{role}" for role in ("target", "draft")]
    assert expected(composed(Config, *pair), ["evaluate"])["evaluate"] > 0
