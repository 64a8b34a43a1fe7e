"""A checkpoint is whole or not there; a damaged one is told, and the one before it, or the start,
is taken.
"""

import os

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger

from nde_talf.draft_training.training.checkpoint import BEFORE, CHECKPOINT
from nde_talf.draft_training.training.lm_training import LanguageModel, build_llama, fit
from nde_talf.draft_training.training.trainer import train_rows
from nde_talf.draft_training.training_settings import LanguageModelConfig
from nde_talf.pipelines.runs.tracking import read_curves
from tests.draft_training.heads import KillBefore, same
from tests.refusal import refusal

TINY = LanguageModelConfig(
    hidden=16,
    layers=1,
    heads=2,
    intermediate=32,
    steps=12,
    batch=2,
    warm_up=2,
    checkpoint_seconds=0,
)
ROWS = torch.arange(8 * 12).reshape(8, 12) % 29


def train(folder, kill=None):
    module, name = LanguageModel(build_llama(TINY, 29), TINY), folder.name + "-curve"
    curves = CSVLogger(folder.parent, name)
    train_rows(module, ROWS, folder, curves, [] if kill is None else [KillBefore(kill)])
    return module.model


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [(), (CHECKPOINT,), (CHECKPOINT, BEFORE)])
def test_a_training_goes_on_from_the_last_whole_checkpoint_and_ends_with_the_same_weights(
    tmp_path, capsys, damaged
):
    undisturbed = train(tmp_path / "undisturbed")
    with pytest.raises(ProcessLookupError):
        train(tmp_path / "killed", kill=7)
    steps = {
        name: torch.load(tmp_path / "killed" / name, weights_only=True)["global_step"]
        for name in (CHECKPOINT, BEFORE)
    }
    assert steps == {CHECKPOINT: 7, BEFORE: 6}
    for name in damaged:
        flip(tmp_path / "killed" / name)
    assert same(train(tmp_path / "killed"), undisturbed)
    said = " ".join(capsys.readouterr().out.split())
    assert (f"{CHECKPOINT} is damaged" in said) == bool(damaged)
    assert (
        not damaged or ("from the start" if len(damaged) == 2 else "from the one before it") in said
    )
    assert sorted(os.listdir(tmp_path / "killed")) == [CHECKPOINT]  # the training has ended
    ours, theirs = (read_curves(tmp_path / f"{name}-curve") for name in ("killed", "undisturbed"))
    assert ours["loss"] == theirs["loss"] and ours["lr"] == theirs["lr"]
    assert [step for step, _ in ours["loss"]] == list(range(TINY.steps))


def test_a_checkpoint_of_another_run_with_equal_shapes_is_refused(tmp_path):
    with pytest.raises(ProcessLookupError):
        train(tmp_path, kill=7)
    path = tmp_path / CHECKPOINT
    before = path.read_bytes()
    with refusal("another run's"):
        fit(LanguageModel(build_llama(TINY, 29), TINY), ROWS.flip(0), tmp_path)
    assert path.read_bytes() == before
    with refusal("other settings"):  # another program's
        LanguageModel(build_llama(TINY, 29), TINY).on_load_checkpoint({})
