"""Warping: temperature and nucleus as transformers has them, for flat and for peaked distributions."""

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import (
    Rng,
    SamplingSetting,
    nucleus,
    search,
    search_on_device,
    warp,
)
from nde_talf.decoding.tree import DraftTree, WarpedRows


@pytest.mark.parametrize(
    "cut",
    [
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"top_k": 5},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.1},
        {"top_k": 400, "top_p": 0.5},
    ],
)
@pytest.mark.parametrize("scale", [0.01, 2.0, 8.0])
def test_warping_and_the_order_of_its_cuts_are_transformers(cut, scale):
    logits = scale * torch.randn(
        5, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        scores = warper(cut[name])(None, scores) if name in cut else scores
    assert torch.allclose(warp(logits, SamplingSetting(0.7, **cut)), scores.softmax(-1), atol=1e-12)


def test_temperature_zero_is_the_first_maximum():
    assert warp(torch.tensor([1.0, 3.0, 3.0]), SamplingSetting(0.0)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-39, 1e-45, 1e-300])
def test_a_temperature_near_zero_shares_out_the_maxima(temperature):
    for logits in (
        torch.tensor([1.0, 2.0, 2.0, -3.0]),
        torch.tensor([1.0, 2.0, 2.0, -3.0]).double(),
    ):
        assert warp(logits, SamplingSetting(temperature)).tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.7])
def test_logits_that_are_no_numbers_are_not_sampled(temperature):
    rows = torch.tensor([[1.0, float("nan"), 2.0], [float("nan")] * 3])
    for row in rows:
        for cut in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}):
            with pytest.raises(ValueError, match="weights"):
                Rng.seeded(0).categorical(warp(row, SamplingSetting(temperature, **cut)))
    tree = DraftTree.rooted(0)
    tree.p = [warp(rows[0], SamplingSetting(0.0))]
    with pytest.raises(ValueError, match="weights"):
        VERIFIERS["greedy"](tree, Rng.seeded(0))


def test_draws_follow_the_weights():
    rng, weights = Rng.seeded(0), torch.tensor([1.0, 0.0, 3.0])
    counts = torch.bincount(
        torch.tensor([rng.categorical(weights) for _ in range(4000)]), minlength=3
    )
    assert counts[1] == 0 and abs(int(counts[2]) - 3000) < 150


def test_draws_at_once_are_draws_in_turn():
    generator = torch.Generator().manual_seed(2)
    rows, at = torch.softmax(3 * torch.randn(3, 40, generator=generator), -1), (0, 0, 2, 1, 0, 2)
    for seed in range(50):
        one, other = Rng.seeded(seed), Rng.seeded(seed)
        assert one.categorical(rows, at) == [other.categorical(rows[row]) for row in at]
        assert one.uniform() == other.uniform()


def test_both_searches_find_the_same():
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(4, 100, generator=generator) ** 4  # not normalised
    which = [3, 0, 0, 2, 1, 1, 1]
    for _ in range(50):
        uniforms = torch.rand(len(which), generator=generator, dtype=torch.float64).tolist()
        one_by_one = [
            search(rows[[at]], [0], [uniform])[0]
            for at, uniform in zip(which, uniforms, strict=True)
        ]
        assert (
            search_on_device(rows, which, uniforms) == search(rows, which, uniforms) == one_by_one
        )


@pytest.mark.parametrize("vocabulary", [50, 20_000])
@pytest.mark.parametrize(
    "setting",
    [
        SamplingSetting(0.7),
        SamplingSetting(0.0),
        SamplingSetting(1.0, 0.8),
        SamplingSetting(1.0, min_p=0.1),
    ],
)
def test_a_row_is_the_same_alone_and_together(vocabulary, setting):
    logits = 3 * torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(5))
    rows, expected = WarpedRows(logits, setting), warp(logits, setting)
    assert rows[0].equal(expected[0]) and rows[1].equal(expected[1])


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_without_a_finite_mass_are_an_error(weights):
    row = torch.tensor(weights)
    for draw in (search, search_on_device):
        with pytest.raises(ValueError, match="weights"):
            draw(torch.stack([torch.ones(2), row]), [0, 1], [0.5, 0.5])
    with pytest.raises(ValueError, match="weights"):
        Rng.seeded(0).categorical(row)


def _sorted_nucleus(row, top_p=1.0, top_k=0, min_p=0.0):
    """The definition of `nucleus` by a full order of the row: (probability descending, then lower
    id), sums in float64.
    """
    order = np.argsort(-row, kind="stable")
    ranked, kept = row[order], np.ones(len(row), dtype=bool)
    if 0 < top_k < len(row):
        kept[top_k:] = False
    masses = np.cumsum(ranked[kept], dtype=np.float64)
    if top_p < 1:
        limit = top_p * masses[-1] if 0 < top_k < len(row) else top_p
        kept[1 : len(masses)] &= masses[:-1] < limit
    kept &= ranked >= ranked[0] * row.dtype.type(min_p)
    out = np.zeros_like(row)
    out[order[kept]] = ranked[kept] / row.dtype.type(ranked[kept].sum(dtype=np.float64))
    return out


def _rows(vocabulary, dtype, generator):
    """Logits [n, V]: random, peaked, flat, tied, one-hot, of bfloat16's resolution, with tokens
    that cannot come.
    """
    normal = torch.randn(vocabulary, generator=generator, dtype=dtype)
    peaked = (2.2 * normal).scatter(0, torch.randint(vocabulary, (12,), generator=generator), 14)
    hot = torch.zeros(vocabulary, dtype=dtype)
    hot[vocabulary // 2] = 200
    yield from (normal, 6 * normal, peaked, 0 * normal, normal.round(), (normal > 1).to(dtype), hot)
    yield from (
        (3 * normal).bfloat16().to(dtype),
        normal.masked_fill(normal < 0.5, -torch.inf).index_fill(0, torch.tensor(0), 0),
    )
    yield -1.2 * torch.randperm(vocabulary, generator=generator).to(dtype).log1p()


CUTS = [{"top_p": top_p} for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9)]
CUTS += [{"top_k": 1}, {"top_k": 40}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 7, "top_p": 0.8}]
CUTS += [{"top_p": 0.9, "min_p": 0.1}, {"top_k": 30, "top_p": 0.7, "min_p": 0.02}]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(n, torch.float32) for n in (1, 2, 65, 3000, 150_000)] + [(300, torch.float64)],
)
def test_what_is_kept_is_that_of_a_sorted_row(vocabulary, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.softmax(torch.stack([*_rows(vocabulary, dtype, generator)]), -1)
    probs[-1] *= 0.99  # as if rounded
    cuts = CUTS if vocabulary < 10_000 else CUTS[3::3]
    for cut in cuts:
        found = nucleus(probs, **cut)
        with monkeypatch.context() as patch:
            patch.setattr("nde_talf.decoding.sampling.asynchronous", lambda device: True)
            on_device = nucleus(probs, **cut)
        for row, own, other in zip(probs.numpy(), found.numpy(), on_device.numpy(), strict=True):
            wanted = _sorted_nucleus(row, **cut)
            assert (own > 0).tolist() == (other > 0).tolist() == (wanted > 0).tolist()
            np.testing.assert_allclose(
                own, wanted, rtol=2e-6 if dtype == torch.float32 else 1e-14, atol=0
            )
            np.testing.assert_allclose(
                other, wanted, rtol=2e-6 if dtype == torch.float32 else 1e-14, atol=0
            )
        assert nucleus(probs.view(2, -1, vocabulary), **cut).equal(found.view(2, -1, vocabulary))
        assert nucleus(probs[3], **cut).equal(found[3])


def test_a_setting_says_what_it_does_and_refuses_what_cannot_be():
    assert str(SamplingSetting(0.6)) == "T=0.6" and str(SamplingSetting(1, 0.9)) == "T=1, top-p=0.9"
    assert str(SamplingSetting(1, 0.9, 50, 0.05)) == "T=1, top-k=50, top-p=0.9, min-p=0.05"
    assert SamplingSetting(1, 0.9, None, None) == SamplingSetting(1, 0.9)
    for wrong in (
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": True},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": float("nan")},
    ):
        with pytest.raises(UserError, match=next(iter(wrong))):
            SamplingSetting(1.0, **wrong)
