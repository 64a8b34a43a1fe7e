"""Passes that are recalled are to the bit those that would be made, and other keys and values are
other passes.
"""

import pytest
import torch

from nde_talf.decoding.session import TreeSession
from nde_talf.decoding.static import StaticShapes
from tests.decoding.pairs import tiny_model
from tests.decoding.remembered import remembered

MODEL = tiny_model(7, hidden=16, layers=2)


@torch.inference_mode()
def passes(forward, fixed: bool, seed: int, spoil: bool = False) -> list[torch.Tensor]:
    """Hidden states of a prompt and of three trees behind it, of each of which a node is kept."""
    own = TreeSession(
        forward,
        MODEL.device,
        MODEL.dtype,
        MODEL.layers,
        StaticShapes(24, rows=8) if fixed else None,
    )
    generator = torch.Generator().manual_seed(seed)
    found = [own.append([1, 2, 3])]
    for _ in range(3):
        tokens = torch.randint(7, (5,), generator=generator).tolist()
        found += [own.grow(tokens[:3], [-1, -1, 0]), own.grow(tokens[3:], [1, 2])]
        own.commit([[0, 2, 4], [1, 3]][tokens[0] % 2])
        if spoil:
            own.cache.layers[0].keys[:, :, 1] += 1e-3
    return found


@pytest.mark.parametrize("fixed", [False, True])
def test_a_recalled_pass_is_the_pass(fixed):
    made = 0

    def counted(*inputs):
        nonlocal made
        made += 1
        return MODEL.hidden(*inputs)

    forward = remembered(counted)
    for _ in range(2):
        for seed in range(4):
            ours, plain = passes(forward, fixed, seed), passes(MODEL.hidden, fixed, seed)
            assert all(torch.equal(*pair) for pair in zip(ours, plain, strict=True))
        assert made <= 25  # the prompts are one, and the second time nothing is made
    spoilt, plain = (
        passes(forward, fixed, 0, spoil=True),
        passes(MODEL.hidden, fixed, 0, spoil=True),
    )
    assert all(torch.equal(*pair) for pair in zip(spoilt, plain, strict=True))
    assert made > 25
