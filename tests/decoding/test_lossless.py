"""Every verifier's output law is the target's, on the host and on the device: by exact enumeration
of the code that the decode loop calls.
"""

import gc
from functools import partial

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.policies.delayed import Delayed, FollowTau
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import RAW, Rng, SamplingSetting, warp
from nde_talf.decoding.tree import DraftTree, Verdict
from nde_talf.decoding.verifier import check_compatible
from tests.decoding.laws import distance, emitted_law, target_law, tokens_law
from tests.decoding.tables import KINDS, Tables, V, emitted, one_step, scored

PATHS = [Action(1, 0, 1), Action(1, 2, 0), Action(1, 0, 0)]
TREES = [Action(2, 0, 1), Action(2, 1, 1), Action(3, 0, 1), Action(4, 2, 0)]
DEEP = [Action(2, 0, 2), Action(2, 1, 2), Action(3, 1, 1), Action(3, 0, 2)]  # over two tokens only
CASES = [
    pytest.param(name, action, marks=pytest.mark.slow if action in DEEP else ())
    for name, rule in VERIFIERS.items()
    if name != "greedy"  # temperature 0 alone
    for action in PATHS + TREES + DEEP
    if Delayed(action).trees in rule.trees
]


# One kind for every change, all of them with the slow tests.
SOME_SLOW = [
    pytest.param(kind, marks=() if kind == "random" else pytest.mark.slow) for kind in KINDS
]


@pytest.mark.parametrize("kind", SOME_SLOW)
@pytest.mark.parametrize(
    "device", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["host", "device"]
)
@pytest.mark.parametrize("name,action", CASES, ids=str)
def test_output_law_is_the_targets(name, action, device, kind):
    if device and VERIFIERS[name].on_device is None:
        pytest.skip("verifies on the host alone")
    if device and action in DEEP and kind != "random":
        pytest.skip("ten times as many outcomes as the shallower trees have")
    few = action in DEEP or (device and action not in PATHS and kind != "random")
    tables, policy = Tables(kind, seed=3, vocabulary=2 if few else V), Delayed(action)
    law = tokens_law(
        tables,
        lambda rng: emitted(scored(tables, policy, rng, device), VERIFIERS[name], rng),
        action.depth + 1,
    )
    tolerance = (
        1e-7 if kind == "close" else 1e-9
    )  # p = q up to 1e-9: the residual is rounding noise
    assert distance(law, target_law(tables, action.depth + 1)) < tolerance


def test_a_biased_verifier_is_caught():
    """Accepting with min(1, p / q) but correcting from p instead of from the residual."""

    def biased(tree, rng):
        child = tree.children[0][0]
        p, q, token = tree.p[0], tree.q[0], tree.tokens[child]
        if rng.bernoulli(float(p[token] / q[token])):
            return Verdict(child, rng.categorical(tree.p[child]))
        return Verdict(0, rng.categorical(p))

    tables = Tables("random", seed=3)
    law = emitted_law(tables, partial(one_step, tables, Delayed(Action(1, 0, 1)), biased), 2)
    assert distance(law, target_law(tables, 2)) > 1e-3


@pytest.mark.parametrize("name", ["naive", "tv", "bv"])
def test_single_path_verifiers_refuse_branching_trees(name):
    with pytest.raises(UserError, match=f"verifier={name}"):
        check_compatible(Delayed(Action(2, 0, 2)).trees, VERIFIERS[name])


@pytest.mark.parametrize("tau", [None, 0, 1, 2, 3])
def test_following_tau_is_lossless(tau):
    """The next tree depends on what was accepted before; given that, the law of what is emitted is
    still the target's.
    """
    tables, policy = Tables("random", seed=3), FollowTau(2, 1, 1)
    depth = min(max((tau or 0) - 1, 0), 1) + 1
    law = emitted_law(
        tables, partial(one_step, tables, policy, VERIFIERS["specinfer"], tau=tau), depth + 1
    )
    assert distance(law, target_law(tables, depth + 1)) < 1e-9


def test_draw_never_returns_a_token_without_mass():
    rng = Rng.seeded(0)
    weights = torch.tensor([0.0, 0.3, 0.0, 1e-30, 0.0])
    assert {rng.categorical(weights) for _ in range(2000)} <= {1, 3}
    assert not any(rng.bernoulli(0.0) for _ in range(1000)) and all(
        rng.bernoulli(1.0) for _ in range(1000)
    )


@pytest.mark.parametrize("name", ["specinfer", "traversal", "gbv"])
def test_a_verification_leaves_no_cycles_that_hold_its_rows(name):
    tree = scored(Tables("random", seed=1), Delayed(Action(3, 1, 2)), Rng.seeded(0))
    VERIFIERS[name](tree, Rng.seeded(0))
    gc.collect()
    gc.disable()
    try:
        VERIFIERS[name](tree, Rng.seeded(1))
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "setting", [RAW, SamplingSetting(0.6), SamplingSetting(0.0), SamplingSetting(1.0, 0.9)], ids=str
)
@pytest.mark.parametrize("vocabulary", [7, 5000, 40_000])
def test_a_path_is_verified_as_any_tree_is(vocabulary, setting):
    """`bv` makes the rows of a path at once and goes along it.

    Draws without replacement are visited node by node; with one draw a node they are the same, and
    so are the verdict and the random numbers used. The rows of p stay as they are.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(9, vocabulary, generator=generator)
    noise = torch.linspace(0.05, 1, 9)[:, None] * torch.randn(9, vocabulary, generator=generator)
    drafted = warp(logits + noise, setting)
    rows, ends = warp(logits, setting).unbind(), set()
    for seed in range(30):
        one, other, tree = Rng.seeded(seed), Rng.seeded(seed), DraftTree.rooted(0)
        length = (8, 5, 1, 0)[seed % 4]
        for node in range(length):
            tree.q[node] = drafted[node]
            tree.add(node, Rng.seeded(100 * seed + node).categorical(drafted[node]), 1.0)
        with torch.inference_mode(seed % 2 == 0):
            tree.score(logits[: length + 1], setting)
            verdict = VERIFIERS["bv"](tree, one)
            assert verdict == VERIFIERS["traversal_without_replacement"](tree, other)
            assert one.uniform() == other.uniform()
            assert all(tree.p[node].equal(rows[node]) for node in range(length + 1))
            tree.p = rows[: length + 1]
            assert verdict == VERIFIERS["bv"](tree, Rng.seeded(seed))
        ends.add(verdict.end)
    assert {0} < ends
