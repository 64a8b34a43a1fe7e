"""Paths that stop while they are drafted, or follow earlier acceptance: their law, and when they
stop.
"""

import pytest

from nde_talf import (
    VERIFIERS,
    EagleDrafter,
    FollowMean,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.decoding.policies.stopping import CRITERIA, ConfidenceStop
from nde_talf.decoding.registry import PATHS
from tests.decoding.laws import distance
from tests.decoding.policies import Kept
from tests.decoding.tiny_loop import DRAFT, HEAD, PROMPT, SETTING, TARGET, law_of, target_law

CLOSE = 1e-6
# Thresholds at which some paths of the tiny pair stop and others go on.
POLICIES = {
    by: lambda by=by: ConfidenceStop(0.42 if by != "path" else 0.2, 3, by) for by in CRITERIA
}
POLICIES["mean"] = lambda: FollowMean(window=2, plus=1, longest=2)
RULES = [name for name, rule in VERIFIERS.items() if rule.trees >= PATHS and name != "greedy"]


def decoder_of(policy, rule, drafter=None):
    return SpeculativeDecoder(TARGET, drafter or LMDrafter(DRAFT), POLICIES[policy](), rule)


@pytest.mark.parametrize(
    "policy,rule",
    [
        pytest.param(policy, rule, marks=pytest.mark.long if rule == "bv" else pytest.mark.law)
        for policy in POLICIES
        for rule in RULES
    ],
)
def test_every_rule_keeps_the_law(policy, rule):
    length = 3 if (policy, rule) == ("mean", "traversal") else 2  # follows earlier steps
    for drafter in (LMDrafter(DRAFT), EagleDrafter(HEAD)):
        law = law_of(decoder_of(policy, rule, drafter), length)
        assert distance(law, target_law(length)) < CLOSE


@pytest.mark.parametrize("by", CRITERIA)
def test_the_path_ends_where_the_draft_is_unsure(by):
    policy = POLICIES[by]()
    kept, lengths = Kept(policy), set()
    decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), kept, "traversal")
    for seed in range(4):
        decoder.generate(PROMPT, 12, SETTING, Rng.seeded(seed))
    for state, tree in kept.drafted:
        rows = [tree.q[node] for node in range(len(tree) - 1)]
        drawn = [float(row[token]) for row, token in zip(rows, tree.tokens[1:], strict=True)]
        confidences = [float(row.max()) for row in rows] if by == "largest" else drawn
        if by == "path":
            confidences = [
                first * second for first, second in zip(drawn, [1.0, *drawn], strict=False)
            ][:2]
        passed = confidences if by == "largest" else confidences[:-1]
        assert all(confidence >= policy.threshold for confidence in passed)
        if by == "largest" and len(rows) < min(policy.longest, state.room):
            assert float(tree.q_at(len(rows)).max()) < policy.threshold
        lengths.add(len(rows))
    assert len(lengths) > 1 and max(lengths) <= 3


def test_picked_tokens_give_greedy_text():
    plain = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), ConfidenceStop(0.999, 1), "traversal")
    picked = SpeculativeDecoder(
        TARGET, LMDrafter(DRAFT), ConfidenceStop(0.45, 4, pick=True), "greedy"
    )
    greedy = SamplingSetting(0.0)
    texts = [decoder.generate(PROMPT, 12, greedy, Rng.seeded(0)) for decoder in (plain, picked)]
    assert texts[0].tokens == texts[1].tokens
    assert len({step.nodes for step in texts[1].steps}) > 1  # an unwarped draft is not always sure


def test_the_mean_acceptance_is_followed():
    policy = FollowMean(window=2, plus=1, longest=5)
    decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), policy, "bv")
    generation = decoder.generate(PROMPT, 30, SETTING, Rng.seeded(3))
    taus = [step.tau for step in generation.steps]
    lengths = [step.nodes - 1 for step in generation.steps]
    assert lengths[0] == 5
    for at in range(1, len(taus) - 1):
        last = taus[max(0, at - 2) : at]
        assert lengths[at] == min(max(round(sum(last) / len(last)) + 1, 1), 5)
