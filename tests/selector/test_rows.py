"""Columns in files: the same roots as in memory, read by row, folds without copies, and no file
left behind.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.features import SCALARS
from nde_talf.selector.roots import PricedRoots, Roots, roots_from_traces
from nde_talf.selector.rows import columns
from tests.selector.examples import TABLE, roots

NAMES = ("h_p_previous", "h_q_previous", "h_q_root")


def stored(folder, count: int = 120, broken: bool = False) -> TraceStore:
    """The roots of `examples.roots` in a store of three shards of training roots and one of others."""
    store, some = TraceStore(folder / "traces"), roots(count, 0)
    for shard, index in enumerate([*torch.arange(count).chunk(3), torch.arange(8)]):
        states = {name: h[index].half() for name, h in zip(NAMES, some.states, strict=True)}
        labels = {name: some_of[index].clone() for name, some_of in some.samples.items()}
        if broken:
            labels["gbv"][-1, 0, 0] = torch.nan
        some_of = {
            "prompt_id": [f"p{int(some.prompt[i])}" for i in index],
            "kind": [some.kind[i] for i in index],
            "split": ["train" if shard < 3 else "validation"] * len(index),
            "temperature": torch.ones(len(index)),
            "top_p": torch.ones(len(index)),
            "context": some.context[index],
            **{name: some.scalars[index, i].clone() for i, name in enumerate(SCALARS)},
        }
        store.write(store.name(shard, 4), some_of | states | labels)
    store.finish()
    return store


def read(folder, in_memory: bool, split: str = "train", **options) -> Roots:
    store = (
        TraceStore(folder / "traces") if (folder / "traces").exists() else stored(folder, **options)
    )
    if in_memory:
        arrays = store.read(split)
        arrays |= {name: arrays[name].astype(np.float32) for name in NAMES}
        return roots_from_traces(arrays, ["specinfer", "gbv"])
    small, large = columns(store, split, folder / "run")
    return roots_from_traces(small, ["specinfer", "gbv"], large=large)


def test_roots_in_files_are_those_in_memory(tmp_path):
    one, other = read(tmp_path, True), read(tmp_path, False)
    assert len(one) == len(other) == 120
    assert one.settings == other.settings and one.kind == other.kind
    index = torch.tensor([3, 119, 0, 3])
    for a, b in zip(
        (*one.states, *one.samples.values()), (*other.states, *other.samples.values()), strict=True
    ):
        assert torch.equal(a, b[:]) and torch.equal(a[index], b[index]) and a.shape == b.shape


def test_chosen_roots_share_the_files_and_labels_of_all(tmp_path):
    priced = [
        PricedRoots.of(read(tmp_path, in_memory), "gbv", [TABLE]) for in_memory in (True, False)
    ]
    for chosen in (torch.arange(120) % 3 == 1, torch.tensor([3, 119, 0, 3])):
        a, b = (roots.where(chosen).where(torch.tensor([0, 2, 1])) for roots in priced)
        assert torch.equal(a.efficiency, b.efficiency) and torch.equal(a.samples, b.samples)
        assert torch.equal(a.efficiency, priced[0].efficiency[chosen][[0, 2, 1]])
        assert a.roots.kind == b.roots.kind
        for x, y in zip(a.roots.states, b.roots.states, strict=True):
            assert torch.equal(x, y[:])


def test_a_file_that_the_disk_cannot_hold_is_refused_before_it_is_written(tmp_path, monkeypatch):
    some = read(tmp_path, False)
    monkeypatch.setattr(
        "nde_talf.selector.rows.shutil.disk_usage",
        lambda folder: SimpleNamespace(free=120 * 6 * 2 - 1),
    )
    with pytest.raises(
        UserError, match=r"a temporary file of 1\.4 kB, and its disk has 1\.4 kB left"
    ):
        some.h_p_previous[:]
    assert not list((tmp_path / "run").iterdir())


def test_labels_that_are_no_numbers_are_named(tmp_path):
    some = read(tmp_path, False, broken=True)
    assert some.samples["specinfer"].mean().isfinite().all()
    for look in (lambda: some.samples["gbv"].mean(), lambda: some.samples["gbv"][:]):
        with pytest.raises(UserError, match="gbv holds NaN"):
            look()
    assert not list((tmp_path / "run").iterdir()), "no half a file is taken for a whole one"
