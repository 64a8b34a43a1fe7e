"""The trace store: what is written is read, by us and by `datasets`; damage is named."""

import datasets
import numpy as np
import pytest
import torch

from data.traces.store import TraceStore
from decoding.common.errors import UserError


def columns(rows: int, split: str = "train", samples: int = 2) -> dict:
    return {
        "prompt_id": [f"p{i}" for i in range(rows)],
        "split": [split] * rows,
        "context": torch.arange(rows),
        "h_q_root": torch.randn(rows, 3),
        "specinfer": torch.randn(rows, samples, 5),
    }


def test_shards_are_read_back_and_by_datasets(tmp_path):
    store, first, second, third = TraceStore(tmp_path), columns(4), columns(3), columns(2, "validation", 4)
    for i, shard in enumerate((first, second, third)):
        store.write(store.name(i, 3), shard)
    read = TraceStore(tmp_path).read("train")
    assert read["prompt_id"].tolist() == first["prompt_id"] + second["prompt_id"]
    expected = torch.cat([first["specinfer"], second["specinfer"]]).numpy()
    assert np.array_equal(read["specinfer"], expected)
    table = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), cache_dir=str(tmp_path / "cache"), split="train"
    )
    labels = table.to_dict()["specinfer"]
    assert np.array_equal(labels[:7], expected) and np.array_equal(labels[7:], third["specinfer"].numpy())
    assert np.array_equal(TraceStore(tmp_path).read("validation")["specinfer"], third["specinfer"].numpy())


def test_a_half_written_shard_is_named(tmp_path):
    store = TraceStore(tmp_path)
    store.write(store.name(0, 1), columns(4))
    path = tmp_path / store.name(0, 1)
    path.write_bytes(path.read_bytes()[:100])
    assert not TraceStore(tmp_path).holds(store.name(0, 1)) and "checksum" in TraceStore(tmp_path).faults()[path.name]
    with pytest.raises(UserError, match=r"traces-00000-of-00001.parquet.*stage=traces again"):
        TraceStore(tmp_path).read("train")
    path.unlink()
    assert not TraceStore(tmp_path).holds(store.name(0, 1)) and "missing" in TraceStore(tmp_path).faults()[path.name]


def test_a_killed_write_leaves_nothing_behind(tmp_path):
    store = TraceStore(tmp_path)
    with pytest.raises(ValueError, match="length"):
        store.write(store.name(0, 1), {**columns(4), "context": torch.arange(3)})
    assert not list(tmp_path.iterdir())


def test_a_shard_without_rows_is_only_an_entry(tmp_path):
    store = TraceStore(tmp_path)
    store.write(store.name(0, 2), {})
    with pytest.raises(UserError, match="no traces"):
        store.read("train")
    store.write(store.name(1, 2), columns(3))
    again = TraceStore(tmp_path)
    assert again.holds(store.name(0, 2)) and not again.faults() and len(again.read("train")["context"]) == 3
    assert [path.name for path in tmp_path.glob("*.parquet")] == [store.name(1, 2)]


def test_splits_may_have_labels_of_different_size(tmp_path):
    store = TraceStore(tmp_path)
    store.write(store.name(0, 2), columns(4))
    judged = {**columns(2), "split": ["validation"] * 2, "specinfer": torch.randn(2, 7, 5)}
    store.write(store.name(1, 2), judged)
    assert store.read("train")["specinfer"].shape == (4, 2, 5)
    assert store.read("validation")["specinfer"].shape == (2, 7, 5)
    assert store.read("test") == {}
