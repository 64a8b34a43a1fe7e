"""Warping: temperature and nucleus as transformers has them, for flat and for peaked distributions."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from decoding.sampling import Coins, SamplingSetting, nucleus, warp


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


def test_draws_follow_the_weights():
    coins, weights = Coins.seeded(0), torch.tensor([1.0, 0.0, 3.0])
    counts = torch.bincount(torch.tensor([coins.draw(weights) for _ in range(4000)]), minlength=3)
    assert counts[1] == 0 and abs(int(counts[2]) - 3000) < 150
