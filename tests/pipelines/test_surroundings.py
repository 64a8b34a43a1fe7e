"""What surrounds a run: names of folders, the home, the working folder, output, W&B."""

import subprocess
import sys

import pytest
import wandb

from nde_talf.pipelines.config.command_line import composed, marked
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.runs.tracking import tracked
from nde_talf.pipelines.stages.pair import _places
from tests import ROOT

NAMES = ["m", "it's", 'a "b"', "a, b", "x=(y)", "你 好", "back\\", "[a]"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name_is_found_from_any_other(tmp_path, monkeypatch, name):
    model = tmp_path / name
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = {marked(f"model.target={place}{name}") for place in ("", "./", "~/", f"{tmp_path}/")}
    assert len(given) == 1
    monkeypatch.chdir("/")
    recorded = given.pop().removeprefix("++")  # as a run's record holds it
    config = composed(Config, recorded, "paths.checkpoints=~/it's")
    assert _places(config.model) == (str(model), None)
    assert config.paths.checkpoints == f"{tmp_path}/it's"


WORK = """
from nde_talf.pipelines.commands.output import steady
with steady():
    for i in range(20_000):
        print("✓", i)
    open("done", "w").close()
"""


@pytest.mark.parametrize(
    "how,status",
    [("> /dev/full", 1), ("| head -1; exit ${PIPESTATUS[0]}", 1), (">&- 2>&- <&-", 0), ("", 0)],
)
def test_work_ends_whatever_becomes_of_what_it_prints(tmp_path, how, status):
    (tmp_path / "work.py").write_text(WORK)
    command = f"LC_ALL=C PYTHONIOENCODING=ascii PYTHONPATH={ROOT} {sys.executable} work.py {how}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "done").exists() and done.returncode == status
    assert done.stdout.startswith("? 0") or how[-1:] in "l-"
    assert ("No space left" in done.stderr) == ("full" in how)


@pytest.mark.slow
def test_figures_are_named_by_their_training_and_their_stage(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")  # takes seconds
    with tracked(Config(), "pair", tmp_path / "pair") as tracker:
        tracker.loggers("head")[1].log_metrics({"loss": 1.5}, 3)
        tracker.log({"agreement": [0.5, 0.25]})
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    wandb.teardown()  # its service has written all
    for name in (b"head/*", b"head/step", b"head/loss", b"pair/agreement/1"):
        assert name in file.read_bytes()


def test_work_goes_on_where_wandb_cannot(tmp_path, capsys):
    (tmp_path / "wandb").touch()
    with tracked(Config(), "pair", tmp_path / "pair") as tracker:
        for step in range(2):
            tracker.loggers("head")[1].log_metrics({"loss": 1.5}, step)
        tracker.log({"loss": 1.5})
    assert capsys.readouterr().out.count("W&B") == 1
