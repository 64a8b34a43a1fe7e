"""Loss curves survive a resume: each step once, as if undisturbed."""

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger

from nde_talf.draft_training.lm_settings import LanguageModelConfig
from nde_talf.draft_training.train_lm import LanguageModel, build_llama, fit
from nde_talf.pipelines.tracking import read_curves
from tests.draft_training.heads import KillBefore

TINY = LanguageModelConfig(
    hidden=16,
    layers=1,
    heads=2,
    intermediate=32,
    steps=30,
    batch=2,
    warm_up=2,
    checkpoint_seconds=0,
)
ROWS = torch.arange(8 * 12).reshape(8, 12) % 29


def train(folder, kill: int | None = None) -> None:
    module = LanguageModel(build_llama(TINY, 29), TINY)
    callbacks = [] if kill is None else [KillBefore(kill)]
    fit(module, ROWS, folder / "training", [CSVLogger(folder, "curve")], callbacks)


@pytest.mark.slow
def test_a_curve_of_a_killed_training_is_that_of_an_undisturbed_one(tmp_path):
    train(tmp_path / "undisturbed")
    for step in (15, 22):
        with pytest.raises(ProcessLookupError):
            train(tmp_path / "killed", step)
    path = tmp_path / "killed/curve/version_1/metrics.csv"
    path.write_text(path.read_text() + "1.0,2")  # a line that the kill cut
    train(tmp_path / "killed")
    ours, theirs = (read_curves(tmp_path / name / "curve") for name in ("killed", "undisturbed"))
    assert ours["loss"] == theirs["loss"] and [step for step, _ in ours["loss"]] == [9, 19, 29]
    assert ours["lr"] == theirs["lr"]
