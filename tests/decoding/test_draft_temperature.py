"""The draft at a temperature of its own: under a greedy target trees branch, and the text stays the
target's.
"""

import pytest
import torch

from nde_talf import (
    VERIFIERS,
    Autoregressive,
    EagleDrafter,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.decoding.features import scalar_features
from nde_talf.decoding.registry import POLICIES
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.sampling.sampling_setting import (
    AUTO,
    DRAWN,
    MATCH,
    RAW,
    drafted_under,
    read_draft_temperature,
)
from nde_talf.pipelines.config.policies import make_policy
from tests.decoding.pairs import tiny_pair
from tests.decoding.policies import Kept
from tests.decoding.tiny_loop import SETTING
from tests.draft_training.heads import random_head
from tests.refusal import refusal

GREEDY = SamplingSetting(0.0)
PAIR = tiny_pair(48, noise=0.1, layers=2)
HEAD_OF_PAIR = random_head(PAIR[0])
SMALLER = {  # options that keep the trees of slow policies small
    "beam": {"k": 3, "depth": 3, "nodes": 8},
    "salf": {"nodes": 8, "batch": 3, "threshold": 0.2},
    "optimal": {"nodes": 8, "batch": 3},
    "dyspec": {"nodes": 8},
    "dyspec_threshold": {"nodes": 8},
}


def decode(policy, rule, draft=None, setting=GREEDY, count=16, head=False):
    drafter = EagleDrafter(HEAD_OF_PAIR) if head else LMDrafter(PAIR[1])
    drafter = None if policy.trees == "none" else drafter
    decoder = SpeculativeDecoder(PAIR[0], drafter, policy, rule, draft)
    return decoder.generate([1, 2, 3], count, setting, Rng.seeded(0)).tokens


@pytest.mark.parametrize(
    "trees,greedy,warm",
    [
        ("top_k", RAW, RAW),
        ("iid", DRAWN, SETTING),
        ("without_replacement", DRAWN, SETTING),
        ("delayed", GREEDY, SETTING),
        ("path", GREEDY, SETTING),
    ],
)
def test_auto_fits_the_trees(trees, greedy, warm):
    assert drafted_under(AUTO, GREEDY, trees) == greedy
    assert drafted_under(AUTO, SETTING, trees) == warm
    assert drafted_under(MATCH, SETTING, trees) == SETTING
    assert drafted_under(DRAWN, SETTING, trees) == DRAWN


def test_what_a_user_may_write():
    words = {
        "auto": AUTO,
        "match": MATCH,
        "raw": RAW,
        "0.5": SamplingSetting(0.5),
        2: SamplingSetting(2.0),
        "0": GREEDY,
    }
    assert {word: read_draft_temperature(word) for word in words} == words
    with refusal("draft_setting=cold: choose auto"):
        SpeculativeDecoder(PAIR[0], LMDrafter(PAIR[1]), make_policy("beam", {}), "nss", "cold")


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, True], ids=["lm", "head"])
@pytest.mark.parametrize(
    "name",
    ["beam", "optimal", "salf", "dynatree", "dyspec", "dyspec_threshold", "sequoia", "fixed"],
)
def test_trees_branch_under_a_greedy_target_and_are_lines_under_a_draft_that_is_greedy_too(
    name, head
):
    """Some node of some tree has two children; with the draft warped like the target none has one
    of positive probability.
    """
    rule, widths = POLICIES.entry(name).about["verifier"], {}
    for draft in (AUTO, MATCH):
        policy = Kept(make_policy(name, SMALLER.get(name, {})))
        decode(policy, rule, draft, head=head)
        trees = [tree for _, tree in policy.drafted]
        widths[draft] = max(
            sum(float(tree.q_at(node)[tree.tokens[child]]) > 0 for child in dict.fromkeys(children))
            for tree in trees
            for node, children in enumerate(tree.children)
            if children
        )
    assert widths[AUTO] > 1 and widths[MATCH] == 1


@pytest.mark.long
@pytest.mark.parametrize("draft", [AUTO, "raw", 0.4], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_greedy_text_is_the_targets_with_every_policy_and_verifier(name, draft):
    plain = decode(Autoregressive(), "nss")
    policy = make_policy(name, SMALLER.get(name, {}))
    for rule in VERIFIERS.values():
        if policy.trees in rule.trees:
            assert decode(policy, rule, draft) == plain, rule.name


@pytest.mark.parametrize("draft", ["match", "raw"])
def test_features_under_a_greedy_target_are_of_unwarped_rows(draft):
    """They are those that a trace computes from the models' logits, and change from root to root."""
    target, small = PAIR
    computed, asked = [], []

    class Seeing(Kept):
        def draft(self, state, drafter, rng):
            computed.append(scalar_features(state.p_previous, *drafter.seen()))
            asked.append((state.context, drafter.setting))
            return super().draft(state, drafter, rng)

    policy = Seeing(make_policy("delayed", {"k": 2, "l2": 2}))
    text = [1, 2, 3, *decode(policy, "specinfer", draft, count=24)]
    with torch.inference_mode():
        p, q = (model.module(torch.tensor([text])).logits[0] for model in (target, small))
    for features, (context, setting) in zip(computed, asked, strict=True):
        assert setting == (GREEDY if draft == "match" else RAW)
        rows = warp(p[context - 2], RAW), warp(q[context - 2], RAW), warp(q[context - 1], RAW)
        torch.testing.assert_close(features, scalar_features(*rows), rtol=1e-3, atol=1e-4)
    assert len(computed) > 4 and (torch.stack(computed).std(0) > 1e-3).all()


def test_a_draft_row_without_an_allowed_token_stays_as_it_was():
    """A head of few tokens may know none that a grammar allows."""
    drafter, hidden = LMDrafter(PAIR[1]), torch.randn(2, PAIR[1].hidden_size)
    drafter.start([1, 2], 3, torch.empty(0), SETTING)
    plain = drafter.distribution(hidden, [])
    allowed = torch.full((2, PAIR[1].vocab_size), -torch.inf)
    allowed[1, 5] = 0.0
    drafter.processed = lambda texts, logits: logits + allowed
    q = drafter.distribution(hidden, [])
    assert torch.equal(q[0], plain[0]) and q[1].tolist() == [0] * 5 + [1] + [0] * (len(q[1]) - 6)
