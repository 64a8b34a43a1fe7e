"""Warping: temperature and nucleus as transformers has them, for flat and for peaked distributions."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from decoding.sampling import Rng, SamplingSetting, nucleus, search, search_on_device, warp
from decoding.tree import DraftTree
from decoding.verification import VERIFIERS


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_warping_is_transformers(scale, top_p):
    logits = scale * torch.randn(5, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(0.7)(None, logits))
    assert torch.allclose(warp(logits, SamplingSetting(0.7, top_p)), scores.softmax(-1), atol=1e-12)


def test_nucleus_is_the_smallest_set_that_reaches_top_p():
    probs = torch.tensor([0.4, 0.1, 0.3, 0.2])
    assert torch.allclose(nucleus(probs, 0.69), torch.tensor([4 / 7, 0, 3 / 7, 0]))
    assert torch.allclose(nucleus(probs, 0.1), torch.tensor([1.0, 0, 0, 0]))


def test_temperature_zero_is_the_first_maximum():
    assert warp(torch.tensor([1.0, 3.0, 3.0]), SamplingSetting(0.0)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-39, 1e-45, 1e-300])
def test_a_temperature_near_zero_shares_out_the_maxima(temperature):
    for logits in (torch.tensor([1.0, 2.0, 2.0, -3.0]), torch.tensor([1.0, 2.0, 2.0, -3.0]).double()):
        assert warp(logits, SamplingSetting(temperature)).tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.7])
def test_logits_that_are_no_numbers_are_not_sampled(temperature):
    rows = torch.tensor([[1.0, float("nan"), 2.0], [float("nan")] * 3])
    for row in rows:
        with pytest.raises(ValueError, match="weights"):
            Rng.seeded(0).categorical(warp(row, SamplingSetting(temperature)))
    tree = DraftTree.rooted(0)
    tree.p = [warp(rows[0], SamplingSetting(0.0))]
    with pytest.raises(ValueError, match="weights"):
        VERIFIERS["greedy"](tree, Rng.seeded(0))


def test_draws_follow_the_weights():
    rng, weights = Rng.seeded(0), torch.tensor([1.0, 0.0, 3.0])
    counts = torch.bincount(torch.tensor([rng.categorical(weights) for _ in range(4000)]), minlength=3)
    assert counts[1] == 0 and abs(int(counts[2]) - 3000) < 150


def test_draws_at_once_are_draws_in_turn():
    generator = torch.Generator().manual_seed(2)
    rows = list(torch.softmax(3 * torch.randn(3, 40, generator=generator), -1))
    asked = [rows[i] for i in (0, 0, 2, 1, 0, 2)]
    for seed in range(50):
        one, other = Rng.seeded(seed), Rng.seeded(seed)
        assert one.categorical(asked) == [other.categorical(row) for row in asked]
        assert one.uniform() == other.uniform()


def test_both_searches_find_the_same():
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(4, 100, generator=generator) ** 4  # not normalised
    which = [3, 0, 0, 2, 1, 1, 1]
    for _ in range(50):
        uniforms = torch.rand(len(which), generator=generator, dtype=torch.float64).tolist()
        one_by_one = [search(rows[[at]], [0], [uniform])[0] for at, uniform in zip(which, uniforms, strict=True)]
        assert search_on_device(rows, which, uniforms) == search(rows, which, uniforms) == one_by_one


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_without_a_finite_mass_are_an_error(weights):
    row = torch.tensor(weights)
    for draw in (search, search_on_device):
        with pytest.raises(ValueError, match="weights"):
            draw(torch.stack([torch.ones(2), row]), [0, 1], [0.5, 0.5])
    with pytest.raises(ValueError, match="weights"):
        Rng.seeded(0).categorical(row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [5, 64, 65, 300])
def test_the_nucleus_is_that_of_a_sorted_row_ties_included(vocabulary, dtype):
    generator = torch.Generator().manual_seed(vocabulary)
    for seed in range(20):
        logits = 3 * torch.randn(vocabulary, generator=generator, dtype=dtype)
        probs = torch.softmax([logits, logits.round(), (logits > 1).to(dtype), 0 * logits][seed % 4], -1)
        values = probs.tolist()
        ranked = sorted(range(vocabulary), key=lambda token: (-values[token], token))
        for top_p in (0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
            mass, kept = 0.0, []
            for token in ranked:
                if mass < top_p:
                    kept.append(token)
                mass += values[token]
            found = nucleus(torch.stack([probs, probs]), top_p)
            assert found[0].nonzero()[:, 0].tolist() == found[1].nonzero()[:, 0].tolist() == sorted(kept)
            torch.testing.assert_close(found[0][kept], probs[kept] / probs[kept].sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("old", "new"), [("accept", "bernoulli"), ("draw", "categorical"), ("draws", "categorical")])
def test_old_names_of_the_randomness_still_work(old, new):
    import decoding.sampling

    asked = {"accept": 0.5, "draw": torch.tensor([1.0, 3.0]), "draws": [torch.tensor([1.0, 3.0])] * 3}[old]
    with pytest.warns(FutureWarning, match="Rng now"):
        rng = decoding.sampling.Coins.seeded(0)
    with pytest.warns(FutureWarning, match=new):
        assert getattr(rng, old)(asked) == getattr(Rng.seeded(0), new)(asked)
