"""transformers' own rule of speculative sampling has the law of ours, draft by draft."""

import pytest
import torch
from transformers.generation import utils

from nde_talf import VERIFIERS, Action, Delayed
from nde_talf.decoding.testing import exact_law
from tests.decoding.laws import distance
from tests.decoding.tables import KINDS, Tables, one_step

DEPTH = 2


def theirs(tables: Tables, rng, monkeypatch) -> tuple:
    """Draft a path and run transformers' function, whose draws are decided by `rng`."""

    def uniforms(ratios):
        """0 where a token is accepted, as it is with probability min(1, ratio); else 2."""
        accepted = [rng.bernoulli(ratio) for ratio in ratios.flatten().tolist()]
        return 2 - 2 * torch.tensor(accepted).to(ratios).reshape(ratios.shape)

    def drawn(weights, num_samples):
        return torch.tensor([[rng.categorical(weights[0])]])

    drafted = []
    for _ in range(DEPTH):
        drafted.append(rng.categorical(tables((*drafted,))[1]))
    rows = [tables((*drafted[:depth],)) for depth in range(DEPTH + 1)]
    p, q = (torch.stack(each).log()[None] for each in zip(*rows, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand_like", uniforms)
        patch.setattr(torch, "multinomial", drawn)
        tokens, matches = utils._speculative_sampling(
            torch.tensor([[0, *drafted]]), q[:, :DEPTH], DEPTH, p
        )
    return (*drafted,), int(matches), tokens[0].tolist()[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_speculative_sampling_is_naive(kind, monkeypatch):
    tables = Tables(kind, seed=1)

    def ours(rng):
        tree, verdict = one_step(tables, Delayed(Action(1, 0, DEPTH)), VERIFIERS["naive"], rng)
        return (*tree.tokens[1:],), tree.depth[verdict.end], verdict.token

    law = exact_law(lambda rng: theirs(tables, rng, monkeypatch))
    assert distance(exact_law(ours), law) < 1e-9
    assert sum(law.values()) == pytest.approx(1)
