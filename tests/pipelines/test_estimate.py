"""Minutes of stages from counted work and prices; what is there already is not counted."""

import pytest
import torch

from nde_talf.pipelines.commands.dry_run import expected
from nde_talf.pipelines.commands.estimate import Size, Work, made_in, minutes, works
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import STAGES, Config
from nde_talf.pipelines.run import run
from tests.pipelines.micro import ROOT
from tests.refusal import refusal

SMOLLM2 = Size(134_515_008, 31_851_000)
PAIR = ROOT / "tests/fixtures/pair"


def work_of(folder, *asked):
    config = composed(Config, *asked)
    return works(config, SMOLLM2, made_in({name: folder / name for name in STAGES}))


def test_work_times_prices_gives_minutes():
    assert minutes(Work(6000, 60, 30, 5), Work(0.01, 0.5, 1, 1)) == pytest.approx(125 / 60)


def test_steps_of_a_head_cost_as_measured_on_smollm2(tmp_path):
    """275 tokens a second with chains, of which the target takes 51 to 60 %, and 182 with trees."""
    asked = ["draft.steps=1", "model.length=512", "model.target=x"]
    chains, trees = (
        work_of(tmp_path, *asked, f"draft.chain_fraction={part}")["draft"].row for part in (1, 0)
    )
    assert 1 / 0.60 < chains / (1.1 * 4 * 512) < 1 / 0.51
    assert trees / chains == pytest.approx(275 / 182, rel=0.05)


def test_what_is_there_is_not_counted(tmp_path):
    before = work_of(tmp_path, "data=self", "model.target=x", "draft.steps=8")
    answers, training = (tmp_path / "draft" / name for name in ("answers", "training"))
    for folder in (answers, training, tmp_path / "traces"):
        folder.mkdir(parents=True)
        (folder / "answers-00000.parquet").touch()
    some = work_of(tmp_path, "data=self", "model.target=x", "draft.steps=8")
    torch.save({"global_step": 6}, training / "last.ckpt")
    rest = work_of(tmp_path, "data=self", "model.target=x", "draft.steps=8")
    assert before["draft"].step - some["draft"].step == 128 * 395 / 32
    assert some["draft"].row - rest["draft"].row > 0.7 * (some["draft"].row - 872 * 395)
    assert 0 < some["traces"].row < before["traces"].row and some["pair"] == before["pair"]


def test_measured_and_computed_prices_are_of_one_order(tmp_path):
    pair = [f"model.{role}={PAIR}/{role}" for role in ("target", "draft")]
    config = composed(Config, *pair, f"paths.checkpoints={tmp_path}", "stage=evaluate")
    (measured, how), (computed, other) = expected(config, measure=True), expected(config)
    assert "timed" in how and "sizes" in other and [*measured] == [*computed] == ["evaluate"]
    assert min(measured.values()) > 0 < min(computed.values())


def test_a_long_stage_says_so_when_it_begins(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    long = ["model=tiny_ci", "model.target_lm.steps=10000000", "data=text", "tracking=disabled"]
    with refusal():
        run(
            composed(
                Config, *long, f"data.source={tmp_path}/empty.txt", f"paths.checkpoints={tmp_path}"
            )
        )
    printed = " ".join(capsys.readouterr().out.split())
    assert "! pair: about " in printed and "evaluate: about" not in printed
