"""Rules that learn while they decode: their law, and that they learn."""

import pytest
import torch

from nde_talf.decoding.actions import Action, tree_index
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.testing import exact_law
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.online import Arms, Bandit, OnlineAcceptance, prices
from tests.decoding.laws import distance
from tests.decoding.tiny_loop import DRAFT, PROMPT, SETTING, TARGET, target_law

CLOSE = 1e-6
ARMS = [Action(1, 0, 1), Action(2, 0, 1), Action(1, 0, 3)]


def linear(target: float = 4.0, draft: float = 1.0):
    return lambda tree, context: target + draft * tree.depth


POLICIES = {
    "online": lambda: OnlineAcceptance(linear(), longest=3, rate=0.5),
    "bandit": lambda: Bandit(linear(), ARMS),
}


def decoder_of(policy, rule: str) -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, LMDrafter(DRAFT), policy, rule)


@pytest.mark.parametrize("policy,rule", [("online", "traversal"), ("bandit", "specinfer")])
def test_the_law_is_the_targets(policy, rule):
    decoder = decoder_of(POLICIES[policy](), rule)
    law = exact_law(lambda rng: tuple(decoder.generate(PROMPT, 2, SETTING, rng).tokens))
    assert distance(law, target_law(2)) < CLOSE


@pytest.mark.law
@pytest.mark.parametrize(
    "policy,rule", [("online", "traversal"), ("online", "specinfer"), ("bandit", "traversal")]
)
def test_learning_keeps_the_law(policy, rule):
    decoder = decoder_of(POLICIES[policy](), rule)
    law = exact_law(lambda rng: tuple(decoder.generate(PROMPT, 3, SETTING, rng).tokens))
    assert distance(law, target_law(3)) < CLOSE


def test_acceptance_is_learned_within_a_text_and_forgotten_after_it():
    policy = OnlineAcceptance(linear(), rate=0.5)
    first = decoder_of(policy, "traversal").generate(PROMPT, 30, SETTING, Rng.seeded(1))
    learned = policy.last
    assert learned != policy.weights
    again = decoder_of(policy, "traversal").generate(PROMPT, 30, SETTING, Rng.seeded(1))
    assert [step.nodes for step in first.steps] == [
        step.nodes for step in again.steps
    ] and policy.last == learned


@pytest.mark.parametrize("draft,longest", [(100.0, 1), (1e-6, 16)])
def test_dear_tokens_are_not_drafted_and_cheap_ones_are(draft, longest):
    policy = OnlineAcceptance(linear(draft=draft), rate=0.0)
    generation = decoder_of(policy, "traversal").generate(PROMPT, 20, SETTING, Rng.seeded(1))
    assert generation.steps[0].nodes - 1 == longest


def test_the_bandit_tries_every_tree_and_then_takes_the_fastest():
    bandit = Bandit(linear(), ARMS, width=0.0)
    arms, chosen = Arms([0] * 3, [0.0] * 3, [0.0] * 3), []
    for _ in range(12):
        best = bandit._best(arms)
        chosen.append(best)
        arms.taken[best] += 1
        arms.tokens[best] += (2.0, 1.0, 3.0)[best]
        arms.seconds[best] += 1.0
    assert chosen == [0, 1, 2] + [2] * 9


def test_prices_are_the_tables():
    table = LatencyTable(
        [1, 100], [1, 20], [1, 4], [[1.0, 2.0], [2.0, 4.0]], [[0.1, 0.2], [0.1, 0.2]]
    )
    own = prices(table, "traversal")
    for tree in (Action(1, 0, 0), Action(1, 3, 2), Action(3, 1, 2)):
        assert own(tree, 48) == pytest.approx(
            float(table.steps(torch.tensor([48]))[0, tree_index(tree)]), rel=1e-6
        )


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: OnlineAcceptance(linear(), longest=17), "longest=17"),
        (lambda: OnlineAcceptance(linear(), rate=-1.0), "rate=-1"),
        (lambda: OnlineAcceptance(linear(), weights=[1.0]), "weights="),
        (lambda: Bandit(linear(), []), "arms="),
        (lambda: Bandit(linear(), ARMS, width=float("nan")), "width=nan"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
