"""Labels from disk are those computed in the step, and are made only once."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.label_source import INDEX, file_name, stored_labels
from nde_talf.draft_training.settings import LOSS_SETTINGS, HeadConfig, Labels, TalfLoss
from nde_talf.draft_training.train_head import HeadBatch, HeadModule
from tests.draft_training.heads import random_head

CONFIG = HeadConfig(
    loss=TalfLoss(k=2, depth=3),
    roots=3,
    chain_fraction=0.0,
    steps=4,
    batch=2,
    warm_up=2,
    checkpoint_seconds=0,
    precision="32-true",
)


@pytest.fixture(scope="module")
def rows(target):
    generator = torch.Generator().manual_seed(0)
    return TokenRows.plain(torch.randint(target.vocab_size, (19, 8), generator=generator))


def config_of(loss="talf", dtype="float32"):
    weights = CONFIG.loss if loss == "talf" else LOSS_SETTINGS[loss]()
    return replace(CONFIG, loss=weights, labels=Labels("features", dtype))


def stored(target, rows, folder, *how, **more):
    return stored_labels(target, rows, range(len(rows)), folder, config_of(*how, **more))


def loss(target, rows, config, source=None):
    numbers = torch.tensor([1, len(rows) - 1])
    module = HeadModule(random_head(target), config, source)
    return module.loss(HeadBatch(rows[numbers], numbers), 0)[0]


@pytest.mark.parametrize("name", ["talf", "hass", "eagle"])
def test_labels_on_disk_give_the_loss_of_the_step(target, rows, tmp_path, name):
    config = config_of(name)
    on_disk = loss(target, rows, config, stored(target, rows, tmp_path, name))
    torch.testing.assert_close(on_disk, loss(target, rows, config), atol=1e-5, rtol=1e-5)
    half = loss(target, rows, config, stored(target, rows, tmp_path / "half", name, "float16"))
    assert 0 < abs(half - on_disk) < 2e-3 * on_disk


def test_a_disk_that_is_too_small_is_refused_after_the_first_row(
    target, rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"need .* and its disk has .*labels\.name=online"):
        stored(target, rows, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]


def test_an_interrupted_preparation_makes_only_what_is_missing(target, rows, tmp_path):
    before = loss(target, rows, CONFIG, stored(target, rows, tmp_path))
    kept, lost = (tmp_path / file_name(number) for number in (0, 1))
    lost.unlink()
    stamp = kept.stat().st_mtime_ns
    again = stored(target, rows, tmp_path)
    assert lost.exists() and kept.stat().st_mtime_ns == stamp
    torch.testing.assert_close(loss(target, rows, CONFIG, again), before)
    with pytest.raises(UserError, match="dtype"):
        stored(target, rows, tmp_path, dtype="float16")
    with pytest.raises(UserError, match="rows"):
        stored(target, rows[:3], tmp_path)
