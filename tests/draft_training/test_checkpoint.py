"""A checkpoint is whole or not there; a killed training goes on from it, a damaged one is refused."""

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger

from nde_talf.draft_training.training.checkpoint import CHECKPOINT
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


def flipped(content):
    content = bytearray(content)
    content[len(content) // 2] ^= 8
    return content


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_weights_and_refuses_a_damaged_checkpoint(tmp_path):
    undisturbed = train(tmp_path / "undisturbed")
    with pytest.raises(ProcessLookupError):
        train(tmp_path / "killed", kill=7)
    path = tmp_path / "killed" / CHECKPOINT
    whole = path.read_bytes()
    assert torch.load(path, weights_only=True)["global_step"] == 7
    for damaged in (flipped(whole), whole[:-100], b"nothing"):
        path.write_bytes(damaged)
        with refusal(f"{CHECKPOINT}: it cannot be read.* delete it to start again"):
            train(tmp_path / "killed")
    path.write_bytes(whole)
    assert same(train(tmp_path / "killed"), undisturbed)
    ours, theirs = (read_curves(tmp_path / f"{name}-curve") for name in ("killed", "undisturbed"))
    assert ours["loss"] == theirs["loss"] and ours["lr"] == theirs["lr"]
    assert [step for step, _ in ours["loss"]] == list(range(TINY.steps))


def test_a_checkpoint_of_another_run_with_equal_shapes_is_refused(tmp_path):
    with pytest.raises(ProcessLookupError):
        train(tmp_path, kill=7)
    path = tmp_path / CHECKPOINT
    before = path.read_bytes()
    with refusal("rows or models"):
        fit(LanguageModel(build_llama(TINY, 29), TINY), ROWS.flip(0), tmp_path)
    assert path.read_bytes() == before
    with refusal("other settings"):  # another program's
        LanguageModel(build_llama(TINY, 29), TINY).on_load_checkpoint({})
