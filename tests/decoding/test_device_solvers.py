"""Rules on the device that give every node a token, and GBV: the host's laws, exactly."""

from itertools import product

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.batch import Nodes, solve_rows
from nde_talf.decoding.rules.khisti import Khisti
from nde_talf.decoding.rules.naive import Naive
from nde_talf.decoding.rules.residual import excess
from nde_talf.decoding.rules.specinfer import SpecInfer
from nde_talf.decoding.rules.spectr import SpecTr, partial_sums, threshold
from nde_talf.decoding.rules.walk import Node, solve
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.testing import exact_law
from tests.decoding.laws import distance
from tests.decoding.pairs import tiny_pair
from tests.decoding.tables import KINDS, Tables
from tests.decoding.wide_rows import rows

SOLVERS = {"naivetree": Naive(), "specinfer": SpecInfer(), "spectr": SpecTr(), "khisti": Khisti()}
NEW = [*SOLVERS, "gbv"]


def on_device(name, p, q, draws, counts, rng):
    return solve_rows(
        SOLVERS[name], Nodes(p, q, draws, counts), torch.ones(len(p), dtype=torch.bool), rng
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOLVERS)
def test_given_the_draws_a_token_has_the_hosts_law(name, kind):
    """At every list of draws, in a row with others that are not the node's own; in the mean over
    the draws it is p.
    """
    p, q = Tables(kind, seed=0)(())
    for k in (1, 2, 3) if kind == "random" else (2,):
        mean = torch.zeros_like(p)
        for drafted in product(*[q.nonzero()[:, 0].tolist()] * k):
            node = p[None], q[None], torch.tensor([[*drafted, *drafted[::-1]]]), torch.tensor([k])
            ours = exact_law(lambda rng, node=node: int(on_device(name, *node, rng)))
            theirs = exact_law(
                lambda rng, drafted=drafted: solve(SOLVERS[name], Node(p, q, list(drafted)), rng)
            )
            if (name, kind) != ("spectr", "close"):  # where many rho are as good
                assert distance(ours, theirs) < 1e-9
            law = torch.tensor([ours.get(token, 0.0) for token in range(len(p))], dtype=p.dtype)
            mean += q[list(drafted)].prod() * law
        torch.testing.assert_close(mean, p, atol=1e-7 if kind == "close" else 1e-9, rtol=0)


@pytest.mark.parametrize("name", SOLVERS)
def test_nodes_of_a_level_do_not_touch_each_other(name):
    """Of different p and q, and with different numbers of draws."""
    p, q = (
        torch.stack(x) for x in zip(*(Tables("random", seed)(()) for seed in range(3)), strict=True)
    )
    draws, counts = torch.tensor([[1, 2, 0], [2, 2, 1], [0, 1, 2]]), torch.tensor([2, 3, 1])

    class Fixed(Rng):
        """All rng show the same."""

        def uniform(self) -> float:
            return self.shown

    for shown in (0.05, 0.3, 0.5, 0.7, 0.95):
        rng = Fixed(torch.Generator())
        rng.shown = shown
        alone = [
            on_device(name, p[i, None], q[i, None], draws[i, None], counts[i, None], rng)
            for i in range(3)
        ]
        assert on_device(name, p, q, draws, counts, rng).tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("kind", ["flat", "peaked", "equal"])
@pytest.mark.parametrize("name", SOLVERS)
def test_tokens_in_float32_are_those_of_float64(name, kind):
    """At a vocabulary of 150,000; but for a coin that lies at an edge."""
    p, q = rows(kind, 2)
    node = q.topk(3).indices, torch.tensor([2, 3])
    tokens = [
        torch.cat(
            [
                on_device(name, p.to(dtype), q.to(dtype), *node, Rng.seeded(seed))
                for seed in range(3)
            ]
        )
        for dtype in (torch.float32, torch.float64)
    ]
    assert (tokens[0] >= 0).all() and (tokens[0] != tokens[1]).sum() <= 1


@pytest.mark.parametrize("kind", ["flat", "peaked", "one-hot"])
def test_rho_in_float32_accepts_what_the_hosts_does_in_float64(kind):
    p, q = rows(kind, 2)
    k = torch.tensor([2.0, 4.0], dtype=torch.float64)
    rho, covered = threshold(
        lambda x: 1 - excess(p, q, x).sum(-1, dtype=torch.float64), k, one=torch.ones_like(k)
    )
    p, q = p.double(), q.double()
    exact = [threshold(partial_sums(p[i], q[i]), float(k[i]), exact=True) for i in range(2)]
    torch.testing.assert_close(
        rho, torch.tensor([x[0] for x in exact], dtype=rho.dtype), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        covered, torch.tensor([x[1] for x in exact], dtype=rho.dtype), atol=1e-5, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NEW, "greedy"])
def test_at_temperature_0_the_target_is_followed(name):
    target, draft = tiny_pair(64, hidden=32, layers=2)
    policy, greedy, warm = Delayed(Action(3, 1, 2)), SamplingSetting(0.0), SamplingSetting(0.7)
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["nss"])
    fast = SpeculativeDecoder(target, LMDrafter(draft), policy, VERIFIERS[name], warm, device=True)
    found, expected = (
        each.generate([1, 2, 3], 40, greedy, Rng.seeded(0)) for each in (fast, plain)
    )
    assert found.tokens == expected.tokens and found.block_efficiency > 1.1


def test_greedy_matching_is_refused_above_temperature_0():
    target, draft = tiny_pair(16)
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(2, 1, 1)), VERIFIERS["greedy"], device=True
    )
    with pytest.raises(UserError, match="temperature 0 only"):
        decoder.generate([1, 2, 3], 10, SamplingSetting(1.0), Rng.seeded(0))
