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

from nde_talf import VERIFIERS, DraftTree, Rng, SamplingSetting
from nde_talf.decoding.sampling.device_rng import search_on_device
from nde_talf.decoding.sampling.nucleus import nucleus, nucleus_sorted
from nde_talf.decoding.sampling.rng import search, warp
from nde_talf.decoding.tree import WarpedRows


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


@pytest.mark.parametrize("temperature", [1e-3, 1e-39, 1e-300])
def test_a_temperature_near_zero_shares_out_the_maxima_and_zero_takes_the_first(temperature):
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([1.0, 2.0, 2.0, -3.0], dtype=dtype)
        assert warp(logits, SamplingSetting(temperature)).tolist() == [0, 0.5, 0.5, 0]
        assert warp(logits, SamplingSetting(0.0)).tolist() == [0, 1, 0, 0]


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


@pytest.mark.parametrize("size", [100, pytest.param(20_000, marks=pytest.mark.slow)])  # in blocks
def test_draws_at_once_are_draws_in_turn_wherever_the_rows_are(size):
    rows = torch.rand(4, size, generator=torch.Generator().manual_seed(3)) ** 4  # not normalised
    end = size * 9 // 10
    rows[:, end:] = rows[::3, : size // 4] = rows[2, : end - 1] = 0
    at = [3, 0, 0, 2, 1, 1, 1]
    for seed in range(100):
        one, two, three = (Rng.seeded(seed) for _ in range(3))
        drawn = [one.categorical(rows[row]) for row in at]
        uniforms = [three.uniform() for _ in at]
        assert drawn == two.categorical(rows, at) == search_on_device(rows, at, uniforms)
        assert one.uniform() == two.uniform() == three.uniform()
    for draw in (search, search_on_device):  # the least and the largest uniform that there is
        drawn = draw(rows, at * 2, [0.0] * len(at) + [1 - 2**-53] * len(at))
        assert (rows[at * 2, drawn] > 0).all()


def test_a_row_is_the_same_alone_and_together():
    for vocabulary in (50, 20_000):
        logits = 3 * torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(5))
        for setting in (SamplingSetting(0.7), SamplingSetting(0.0), SamplingSetting(1.0, 0.8)):
            rows, expected = WarpedRows(logits, setting), warp(logits, setting)
            assert rows[1].equal(expected[1]) and rows[0].equal(expected[0])


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
    yield normal.index_fill(0, torch.tensor(0), 14)  # a few tokens of a large row mislead
    yield -1.2 * torch.randperm(vocabulary, generator=generator).to(dtype).log1p()


CUTS = [{"top_p": top_p} for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9)]
CUTS += [{"top_k": 1}, {"top_k": 40}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 7, "top_p": 0.8}]
CUTS += [{"top_p": 0.9, "min_p": 0.1}, {"top_k": 30, "top_p": 0.7, "min_p": 0.02}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(n, torch.float32) for n in (1, 2, 65, 3000, 150_000)] + [(300, torch.float64)],
)
def test_what_is_kept_is_that_of_a_sorted_row(vocabulary, dtype):
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.softmax(torch.stack([*_rows(vocabulary, dtype, generator)]), -1)
    probs[-1] *= 0.99  # as if rounded
    cuts = CUTS if vocabulary < 10_000 else CUTS[3::3]
    for cut in cuts:
        on_host = nucleus(probs, **cut)
        on_device = nucleus_sorted(probs, **{"top_p": 1.0, "top_k": 0, "min_p": 0.0} | cut)
        tolerance = 2e-6 if dtype == torch.float32 else 1e-14
        for row, *nuclei in zip(probs.numpy(), on_host.numpy(), on_device.numpy(), strict=True):
            expected = _sorted_nucleus(row, **cut)
            for kept in nuclei:
                assert (kept > 0).tolist() == (expected > 0).tolist()
                np.testing.assert_allclose(kept, expected, rtol=tolerance, atol=0)
        assert nucleus(probs.view(1, -1, vocabulary), **cut).equal(on_host[None])
        assert nucleus(probs[3], **cut).equal(on_host[3])
