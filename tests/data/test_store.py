"""The trace store: what is written is read, by us and by `datasets`; damage is named."""

import datasets
import numpy as np
import torch

from nde_talf.data.traces.store import TraceStore
from tests.refusal import refusal


def columns(rows, split="train", samples=2):
    return {
        "prompt_id": [f"p{i}" for i in range(rows)],
        "split": [split] * rows,
        "context": torch.arange(rows),
        "h_q_root": torch.randn(rows, 3),
        "specinfer": torch.randn(rows, samples, 5),
    }


def written(folder, *shards):
    store = TraceStore(folder)
    for i, shard in enumerate(shards):
        store.write(store.name(i, len(shards)), shard)
    return store


def test_shards_are_read_back_and_by_datasets(tmp_path):
    shards = columns(4), columns(3), columns(2, "validation", 4)
    written(tmp_path, *shards)
    first, second, third = (shard["specinfer"].numpy() for shard in shards)
    read = TraceStore(tmp_path).read("train")
    assert all(values.flags.writeable for values in read.values())
    assert read["prompt_id"].tolist() == shards[0]["prompt_id"] + shards[1]["prompt_id"]
    assert np.array_equal(read["specinfer"], np.concatenate([first, second]))
    assert np.array_equal(TraceStore(tmp_path).read("validation")["specinfer"], third)
    files, cache = str(tmp_path / "*.parquet"), str(tmp_path / "cache")
    table = datasets.load_dataset("parquet", data_files=files, cache_dir=cache, split="train")
    assert table.to_dict()["specinfer"] == [*first.tolist(), *second.tolist(), *third.tolist()]


def test_damage_is_named_where_it_is_read_and_nowhere_else(tmp_path):
    store = written(tmp_path, columns(4), columns(4), columns(4, "validation"))
    second, third = (tmp_path / store.name(i, 3) for i in (1, 2))
    third.unlink()
    assert TraceStore(tmp_path).read("train")["h_q_root"].shape == (8, 3)
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    damaged = TraceStore(tmp_path)
    assert list(damaged.faults()) == [second.name, third.name] and not damaged.holds(second.name)
    for split, words in (("train", r"00001.*checksum"), ("validation", r"00002.*missing")):
        with refusal(rf"{words}.*stage=traces again"):
            damaged.read(split)
