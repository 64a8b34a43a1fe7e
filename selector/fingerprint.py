"""Fingerprint of a model's weights: its sizes and a few weights, whatever the number format."""

from collections.abc import Sequence

import torch

from nde_talf.decoding.models.causal_model import CausalModel

PROBES = 24  # tensors with one weight in the fingerprint
# largest difference of a weight, as a fraction of its neighbours' mean size: rounding to 8 bits
# stays below
CLOSE = 0.1


def sizes(model: CausalModel) -> list[int]:
    """Return hidden size, layers and vocabulary, which identify the models of a latency table."""
    return [model.hidden_size, model.config.num_hidden_layers, model.vocab_size]


@torch.no_grad()
def fingerprint(model: CausalModel) -> list[float]:
    """Return three sizes, then a weight from each of `PROBES` tensors over its neighbours' mean."""
    weights = [*model.module.parameters()]
    probed = [weights[i * (len(weights) - 1) // (PROBES - 1)].flatten() for i in range(PROBES)]
    middles = [weight[len(weight) // 2 :][:256].float() for weight in probed]
    return [
        *map(float, sizes(model)),
        *(round(float(x[0] / x.abs().mean().clamp(min=1e-12)), 4) for x in middles),
    ]


def same_model(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two fingerprints are of one model, in whatever number format."""
    return (
        len(one) == len(other)
        and one[:3] == other[:3]
        and all(abs(a - b) <= CLOSE for a, b in zip(one, other, strict=True))
    )
