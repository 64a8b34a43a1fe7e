"""Recorded levels and verification: the tokens of an unrecorded step, by functions that look at no
number.

A CPU has no CUDA graphs. In their place torch traces each function once (`make_fx`) and runs the
operations that it found on other inputs, as a graph's replay does: what depended on a number would
be wrong or could not be traced.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.captured import Bucket, buckets, verify_tree
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.delayed import Delayed, FollowTau
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import RAW, Rng, SamplingSetting
from nde_talf.decoding.static import StaticShapes, unrecorded
from nde_talf.decoding.testing import exact_law
from nde_talf.draft_training.head_drafter import EagleDrafter
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_eagle3

PROMPTS = ([5, 6, 7], [3])
WARPED, GREEDY = SamplingSetting(0.7, 0.9), SamplingSetting(0.0)
LONG = pytest.mark.law


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The nucleus by a sort, without a look at the numbers."""
    monkeypatch.setattr("nde_talf.decoding.sampling.asynchronous", lambda _: True)


class Traces:
    """Traces a function instead of recording it. made: how many."""

    def __init__(self):
        self.made = 0

    def __call__(self, function, inputs):
        self.made += 1
        return make_fx(lambda *own: tuple(function(*own)))(*[own.clone() for own in inputs])


class Forbids:
    """Half of all tokens, whatever the text."""

    textless = True

    def __call__(self, texts, logits):
        return logits.index_fill(-1, torch.arange(8, 16), -torch.inf)


@pytest.mark.parametrize(
    "rule,policy,setting,with_head",
    [
        ("specinfer", Delayed(Action(3, 1, 2)), WARPED, False),
        pytest.param("specinfer", Delayed(Action(3, 0, 3)), GREEDY, False, marks=LONG),
        pytest.param("naivetree", Delayed(Action(2, 1, 2)), RAW, True, marks=LONG),
        pytest.param("nss", FollowTau(2, 2, 4), WARPED, False, marks=LONG),
        pytest.param("greedy", Delayed(Action(2, 1, 2)), GREEDY, False, marks=LONG),
        pytest.param("spectr", Delayed(Action(3, 0, 2)), RAW, False, marks=LONG),
        pytest.param("khisti", Delayed(Action(3, 0, 2)), RAW, False, marks=LONG),
        pytest.param("traversal", Delayed(Action(2, 1, 3)), WARPED, True, marks=LONG),
        pytest.param("bv", Delayed(Action(1, 0, 4)), WARPED, False, marks=LONG),
        pytest.param("gbv", Delayed(Action(3, 0, 2)), RAW, False, marks=LONG),
    ],
)
def test_the_tokens_are_those_of_an_unrecorded_step(as_on_a_gpu, rule, policy, setting, with_head):
    target, draft = tiny_pair(16, layers=3)
    head, traces = random_eagle3(target) if with_head else None, Traces()
    found = []
    for static in (
        None,
        StaticShapes(60, rows=16, record=unrecorded),
        StaticShapes(60, rows=16, record=traces),
    ):
        drafter = EagleDrafter(head, static) if head else LMDrafter(draft, static)
        decoder = SpeculativeDecoder(target, drafter, policy, rule, static=static, device=True)
        found.append([])
        for seed, prompt in enumerate(PROMPTS):
            found[-1].append(decoder.generate(prompt, 12, setting, Rng.seeded(seed)).tokens)
            made = traces.made
    # Of trees of several depths the shallower ones are padded, and the rule takes random numbers
    # for the padded levels too.
    assert (
        found[1] == found[2]
        and traces.made == made
        and (found[0] == found[1] or len(policy.shapes) > 1)
    )
    assert 2 <= made <= 8


@pytest.mark.parametrize("action", [Action(1, 0, 0), Action(2, 0, 2)])
def test_a_root_alone_is_verified_one_operation_at_a_time(action):
    """So is every tree for which the context has no room left."""
    target, draft = tiny_pair(16, layers=1)
    found = []
    for records in (False, True):
        static = StaticShapes(12, rows=8, record=unrecorded)
        decoder = SpeculativeDecoder(
            target, LMDrafter(draft, static), Delayed(action), "nss", static=static, device=True
        )
        decoder._captures = decoder._captures if records else None
        found.append(decoder.generate(PROMPTS[0], 99, WARPED, Rng.seeded(1)).tokens)
    assert len(found[0]) >= 12 - len(PROMPTS[0]) and (found[0] == found[1] or action.depth)
    assert len(found[0]) == len(found[1])


def test_processed_logits_are_not_recorded():
    """A recorded level has the draft's own logits."""
    target, draft = tiny_pair(16, layers=1)
    static = StaticShapes(40, rows=8, record=unrecorded)
    decoder = SpeculativeDecoder(
        target,
        LMDrafter(draft, static),
        Delayed(Action(2, 0, 2)),
        "nss",
        static=static,
        device=True,
    )
    decoder.process = Forbids()
    found = decoder.generate(PROMPTS[0], 30, RAW, Rng.seeded(0))
    assert max(found.tokens) < 8 and found.block_efficiency > 1
    assert decoder.drafting.root.q[8:].sum() == 0


def test_there_are_at_most_eight_buckets():
    size = StaticShapes(100, rows=128).size
    assert (
        buckets([Action(3, 0, 5)], size) == [Bucket(16, 5, 3)]
        and buckets([Action(1, 0, 0)], size) == []
    )
    found = buckets(TREES, size)
    assert [bucket.size for bucket in found] == [2, 4, 8, 16, 32, 64]
    for tree in TREES:
        if tree.depth:
            bucket = next(own for own in found if own.size == size(tree.nodes))
            assert tree.depth <= bucket.depth and (tree.k if tree.l2 else 1) <= bucket.draws


@pytest.mark.parametrize(
    "rule", ["specinfer", "naivetree", "nss", "spectr", "khisti", "traversal", "gbv"]
)
def test_a_padded_tree_is_verified_by_the_targets_law(rule, monkeypatch):
    """Two draws at the root, in a bucket of six nodes and depth 3."""
    monkeypatch.setattr("nde_talf.decoding.captured.Supplied", lambda rng: rng)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    q = torch.softmax(torch.randn(6, 3, generator=generator, dtype=torch.float64), -1)
    parents, sees = torch.tensor([-1, 0, 0, -2, -2, -2]), torch.eye(6, dtype=torch.bool)
    sees[:3, 0] = True

    def first_token(rng) -> int:
        draws = [rng.categorical(q[0]) for _ in range(2)]
        tokens = torch.tensor([0, *draws, 0, 0, 0])
        end, _, nodes, drawn, root, row = verify_tree(
            VERIFIERS[rule], RAW, Bucket(6, 3, 2), logits, tokens, parents, sees, q, rng
        )
        assert (
            int(root) == (0 if int(end) == 0 else 1)
            and row.shape == (1, 3)
            and len(nodes) == len(drawn) == 4
        )
        return int(drawn[0])

    law, p = exact_law(first_token), torch.softmax(logits[0], -1)
    assert [law[token] for token in range(3)] == pytest.approx(p.tolist(), abs=1e-9)
