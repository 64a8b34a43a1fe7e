"""What is worked out before the host knows the next root is what it would have been afterwards."""

from itertools import islice

import pytest
import torch

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import Chooser
from nde_talf.decoding.policies.delayed import Autoregressive, FollowTau
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.static import StaticShapes
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.selector.evaluate import EntropyRule
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_head
from tests.selector.examples import TABLE, schema

PROMPT = [1, 2, 3, 4]
TARGET, DRAFT = tiny_pair(64, hidden=32, layers=2)


def drafter(with_head: bool, static: StaticShapes | None = None):
    return EagleDrafter(random_head(TARGET), static) if with_head else LMDrafter(DRAFT, static)


class Checked(NeuralPolicy):
    """Its choices change with the context; every one that was made ahead is made again."""

    def __init__(self):
        torch.manual_seed(4)
        selector = Selector(schema(32, 32, ("specinfer", "traversal")))
        with torch.no_grad():
            selector.network.mlp[-1].weight.mul_(30)
            selector.network.mlp[-1].bias[
                torch.tensor([tree.depth > 6 for tree in TREES]).repeat(2)
            ] = -1e3
        super().__init__(selector, TABLE)
        self.checks = 0

    def draft(self, state, drafter, rng):
        assert state.choice == self.choose(state, drafter)
        self.checks += 1
        return super().draft(state, drafter, rng)


@pytest.mark.slow
@pytest.mark.parametrize("with_head,static", [(False, False), (False, True), (True, True)])
def test_a_choice_made_ahead_is_the_one_made_at_the_root_and_decoding_stays_exact(
    with_head, static
):
    shapes = StaticShapes(60) if static else None
    policy, plain = Checked(), SpeculativeDecoder(TARGET, None, Autoregressive(), VERIFIERS["nss"])
    warm, greedy = (
        SamplingSetting(0.7),
        SamplingSetting(0.0),
    )  # the draft's, so that branches differ
    decoder = SpeculativeDecoder(
        TARGET,
        drafter(with_head, shapes),
        policy,
        policy.verifier,
        warm,
        static=shapes,
        device=True,
    )
    # With static shapes to the end of the context.
    tokens = decoder.generate(PROMPT, 1000 if static else 40, greedy, Rng.seeded(0)).tokens
    assert tokens == plain.generate(PROMPT, len(tokens), greedy, Rng.seeded(0)).tokens
    assert policy.checks > 8 and len(policy.counts) > 3


@pytest.mark.parametrize("with_head", [False, True])
def test_a_drafter_that_went_ahead_stands_where_a_fresh_one_would(with_head):
    setting = SamplingSetting(0.9, 0.97)
    decoder = SpeculativeDecoder(
        TARGET, drafter(with_head), FollowTau(3, 2, 4), VERIFIERS["traversal"], device=True
    )
    stream = decoder.stream(PROMPT, setting, Rng.seeded(1))
    text, taus = [*PROMPT, next(stream)[0]], set()
    for step in islice(stream, 15):
        text += step.tokens
        taus.add(step.tau)
        fresh, positions = drafter(with_head), torch.arange(len(text) - 1)[None]
        features = TARGET.hidden(torch.tensor([text[:-1]]), positions, None, None)[0]
        fresh.start(text[:-1], text[-1], features, setting)
        for point in ("previous", "root"):
            for ours, theirs in zip(
                getattr(decoder.drafting, point), getattr(fresh, point), strict=True
            ):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert len(taus) > (1 if with_head else 2)


def test_the_rule_by_entropy_chooses_ahead():
    rule = EntropyRule([1.0, 2.5], [Action(1, 0, 4), Action(2, 1, 2), Action(3, 0, 1)])
    assert isinstance(rule, Chooser) and all(tree in TREES for tree in rule.chosen_trees)
    warm, verifier, steps = SamplingSetting(0.7), VERIFIERS["traversal"], {}
    for device in (False, True):  # at temperature 0 both write the same
        decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), rule, verifier, warm, device=device)
        steps[device] = decoder.generate(PROMPT, 30, SamplingSetting(0.0), Rng.seeded(0))
    assert steps[True].tokens == steps[False].tokens
