"""float32 rows over a vocabulary of 150,000."""

import torch

from nde_talf import SamplingSetting
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.sampling.sampling_setting import RAW

V = 150_000


def rows(kind, count):
    """p, q [count, V] in float32, as the loop makes them."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(count, V, generator=generator)
    other = torch.randn(count, V, generator=generator)
    if kind == "flat":
        return warp(0.1 * logits, RAW), warp(0.1 * other, RAW)
    if kind == "peaked":
        return warp(4 * logits, RAW), warp(4 * logits + other, RAW)
    if kind == "equal":
        return warp(4 * logits, RAW), warp(4 * logits, RAW)
    assert kind == "one-hot"
    return warp(logits, SamplingSetting(0.0)), warp(6 * logits, RAW)
