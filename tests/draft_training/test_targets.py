"""Labels from disk are those computed in the step, cost what was said, and are made only once."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.label_source import (
    INDEX,
    SHARD_ROWS,
    bytes_needed,
    check_disk,
    shard_name,
    stored_labels,
)
from nde_talf.draft_training.settings import LOSSES, FeatureLabels, HeadConfig, TalfLoss, TopLabels
from nde_talf.draft_training.train_head import HeadBatch, HeadModule, build_head, fit_head
from tests.draft_training.documents import packed
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
    tokens = torch.randint(
        target.vocab_size, (SHARD_ROWS + 3, 8), generator=torch.Generator().manual_seed(0)
    )
    return TokenRows.plain(tokens)


def config_of(mode="features", loss="talf", dtype="float32", m=29):
    labels = TopLabels(m=m, dtype=dtype) if mode == "top_m" else FeatureLabels(dtype=dtype)
    return replace(CONFIG, loss=CONFIG.loss if loss == "talf" else LOSSES[loss](), labels=labels)


def stored(target, rows, folder, *how, **more):
    return stored_labels(target, rows, folder, config_of(*how, **more))


def loss(target, rows, config, source=None):
    numbers = torch.tensor([1, len(rows) - 1])
    return HeadModule(random_head(target), config, source).loss(
        HeadBatch(rows[numbers], numbers), 0
    )[0]


@pytest.mark.parametrize(
    ("mode", "name"),
    [("features", "talf"), ("features", "hass"), ("features", "eagle"), ("top_m", "talf")],
)
def test_labels_on_disk_give_the_loss_of_the_step(target, rows, tmp_path, mode, name):
    config = config_of(mode, name)
    on_disk = loss(target, rows, config, stored(target, rows, tmp_path, mode, name))
    torch.testing.assert_close(on_disk, loss(target, rows, config), atol=1e-5, rtol=1e-5)


def test_half_precision_and_truncation_cost_what_they_leave_out(target, rows, tmp_path):
    whole = loss(target, rows, CONFIG)
    half = loss(target, rows, CONFIG, stored(target, rows, tmp_path / "half", dtype="float16"))
    assert 0 < abs(half - whole) < 2e-3 * whole
    cut = [
        loss(target, rows, CONFIG, stored(target, rows, tmp_path / str(m), "top_m", m=m))
        for m in (4, 16, 29)
    ]
    assert cut[0] < cut[1] < cut[2]  # every label adds its own -p log q
    torch.testing.assert_close(cut[2], whole, atol=1e-5, rtol=1e-5)


def test_packed_rows_come_back_from_disk_as_they_are_online(target, tmp_path):
    rows = packed()
    batch = HeadBatch(rows, torch.arange(1))
    head = random_head(target)
    online = HeadModule(head, CONFIG).loss(batch, 0)[0]
    on_disk = HeadModule(head, CONFIG, stored(target, rows, tmp_path)).loss(batch, 0)[0]
    torch.testing.assert_close(on_disk, online, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "name"), [("features", "talf"), ("top_m", "talf"), ("features", "eagle")]
)
def test_the_disk_it_takes_is_the_disk_it_says(target, rows, tmp_path, mode, name):
    stored(target, rows, tmp_path, mode, name, "float16", m=5)
    tensors = [
        tensor for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values()
    ]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    said = bytes_needed(config_of(mode, name, "float16", 5), len(rows), 8, target.hidden_size)
    assert sum(tensor.nbytes for tensor in tensors) == said


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(target, tmp_path):
    needed = bytes_needed(HeadConfig(labels=FeatureLabels()), 68_000, 2048, 4096)
    assert 1.0e13 < needed < 1.1e13  # ten terabytes for ShareGPT beside a 7B target
    with pytest.raises(UserError, match=r"labels\.name=online"):
        check_disk(tmp_path, 1 << 60, "features")


def test_an_interrupted_preparation_makes_only_what_is_missing(target, rows, tmp_path):
    stored(target, rows, tmp_path)
    before = loss(target, rows, CONFIG, stored(target, rows, tmp_path))
    kept, lost = (tmp_path / shard_name(number) for number in (0, 1))
    lost.unlink()
    stamp = kept.stat().st_mtime_ns
    again = stored(target, rows, tmp_path)
    assert lost.exists() and kept.stat().st_mtime_ns == stamp
    torch.testing.assert_close(loss(target, rows, CONFIG, again), before)
    with pytest.raises(UserError, match="dtype"):
        stored(target, rows, tmp_path, dtype="float16")
    with pytest.raises(UserError, match="rows"):
        stored(target, rows[:3], tmp_path)


@pytest.mark.parametrize("mode", ["features", "top_m"])
def test_training_from_disk_makes_the_labels_first(target, rows, tmp_path, mode):
    config = config_of(mode)
    head = fit_head(target, rows, config, tmp_path / mode)
    online = fit_head(target, rows, CONFIG, tmp_path / "online")
    assert (tmp_path / mode / "labels" / INDEX).exists()
    assert (
        len(list((tmp_path / mode / "labels").glob("*.safetensors"))) == 1
    )  # 8 of the 19 rows are ever seen
    for ours, theirs, start in zip(
        head.parameters(), online.parameters(), build_head(target, CONFIG).parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
        assert not torch.equal(ours, start)


def test_labels_in_float16_are_read_under_bfloat16(target, rows, tmp_path):
    fit_head(target, rows, replace(config_of(dtype="float16"), precision="bf16-mixed"), tmp_path)
