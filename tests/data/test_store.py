"""The trace store: what is written is read, by us and by `datasets`; damage is named; several
processes write at once.
"""

import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch

from nde_talf.data.traces.store import INDEX, TraceStore
from nde_talf.decoding.common.errors import UserError


def columns(rows: int, split: str = "train", samples: int = 2) -> dict:
    return {
        "prompt_id": [f"p{i}" for i in range(rows)],
        "split": [split] * rows,
        "context": torch.arange(rows),
        "h_q_root": torch.randn(rows, 3),
        "specinfer": torch.randn(rows, samples, 5),
    }


def test_shards_are_read_back_and_by_datasets(tmp_path):
    store, first, second, third = (
        TraceStore(tmp_path),
        columns(4),
        columns(3),
        columns(2, "validation", 4),
    )
    for i, shard in enumerate((first, second, third)):
        store.write(store.name(i, 3), shard)
    read = TraceStore(tmp_path).read("train")
    assert read["prompt_id"].tolist() == first["prompt_id"] + second["prompt_id"]
    expected = torch.cat([first["specinfer"], second["specinfer"]]).numpy()
    assert np.array_equal(read["specinfer"], expected)
    table = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "*.parquet"),
        cache_dir=str(tmp_path / "cache"),
        split="train",
    )
    labels = table.to_dict()["specinfer"]
    assert np.array_equal(labels[:7], expected) and np.array_equal(
        labels[7:], third["specinfer"].numpy()
    )
    assert np.array_equal(
        TraceStore(tmp_path).read("validation")["specinfer"], third["specinfer"].numpy()
    )


def test_a_half_written_shard_is_named(tmp_path):
    store = TraceStore(tmp_path)
    store.write(store.name(0, 1), columns(4))
    path = tmp_path / store.name(0, 1)
    path.write_bytes(path.read_bytes()[:100])
    assert (
        not TraceStore(tmp_path).holds(store.name(0, 1))
        and "checksum" in TraceStore(tmp_path).faults()[path.name]
    )
    with pytest.raises(UserError, match=r"traces-00000-of-00001.parquet.*stage=traces again"):
        TraceStore(tmp_path).read("train")
    path.unlink()
    assert (
        not TraceStore(tmp_path).holds(store.name(0, 1))
        and "missing" in TraceStore(tmp_path).faults()[path.name]
    )


def test_a_shard_without_rows_is_only_an_entry(tmp_path):
    store = TraceStore(tmp_path)
    store.write(store.name(0, 2), {})
    with pytest.raises(UserError, match="no traces"):
        store.read("train")
    store.write(store.name(1, 2), columns(3))
    again = TraceStore(tmp_path)
    assert (
        again.holds(store.name(0, 2))
        and not again.faults()
        and len(again.read("train")["context"]) == 3
    )
    again.finish()
    assert TraceStore(tmp_path).shards == again.shards
    assert [path.name for path in tmp_path.glob("*.parquet")] == [store.name(1, 2)]


WRITE = """
import sys
from nde_talf.data.traces.store import TraceStore
from tests.data.test_store import columns
store = TraceStore(sys.argv[1])
for shard in range(int(sys.argv[2]), 40, 2):
    store.write(store.name(shard, 40), columns(3, "train" if shard % 3 else "validation"))
"""


def test_two_processes_write_one_store_at_once(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path), str(first)])
        for first in (0, 1)
    ]
    assert [writer.wait(timeout=500) for writer in writers] == [0, 0]
    store = TraceStore(tmp_path)
    assert sorted(store.shards) == [store.name(i, 40) for i in range(40)] and not store.faults()
    before = store.read("train")
    store.finish()
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [INDEX]
    assert TraceStore(tmp_path).shards == store.shards and TraceStore(tmp_path).roots == 120
    after = TraceStore(tmp_path).read("train")
    assert len(before["context"]) == 78 and all(
        np.array_equal(before[name], after[name]) for name in before
    )


def test_a_read_opens_only_what_it_returns(tmp_path):
    """Damage elsewhere is none of its business; to columns of its own shards it is."""
    store = TraceStore(tmp_path)
    for shard, split in enumerate(("train", "train", "validation")):
        store.write(store.name(shard, 3), columns(4, split))
    store.finish()
    (tmp_path / store.name(2, 3)).unlink()
    stored = TraceStore(tmp_path).read("train", ["context", "h_q_root"])
    assert list(stored) == ["context", "h_q_root"] and stored["h_q_root"].shape == (8, 3)
    with pytest.raises(UserError, match=r"00002-of-00003.*missing"):
        TraceStore(tmp_path).read("validation", ["context"])
    second = tmp_path / store.name(1, 3)
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"00001-of-00003.*checksum"):
        TraceStore(tmp_path).read("train", ["context"])
