"""Baselines with a parameter: what is tried, and that the fastest is taken and decodes."""

import pytest

from nde_talf.decoding.mixed import Mixed
from nde_talf.decoding.ngram_settings import NgramConfig
from nde_talf.decoding.policies.stopping import ConfidenceStop
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.evaluation.methods import NGRAM, Bench, selector_title
from nde_talf.evaluation.trials import trial_count
from nde_talf.evaluation.tuned import (
    FAMILIES,
    MIXED_FAMILIES,
    add_tuned,
    candidates,
    learn_online,
    mixed_candidates,
    mixed_role,
    ngram_candidates,
    tune,
)
from nde_talf.selector.online import OnlineAcceptance
from tests.decoding.pairs import tiny_pair
from tests.evaluation.labelled import BEST, SETTING, TABLE, roots

GREEDY = SamplingSetting(0.0)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(*tiny_pair(40), roots(BEST), TABLE, 12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("setting", [SETTING, GREEDY], ids=str)
def test_every_family_has_policies_that_decode(bench, family, setting):
    tried = candidates(bench, family, "traversal", setting)
    if family in ("online acceptance", "bandit") and setting == GREEDY:
        assert not tried  # nothing is traced there
        return
    assert len(tried) >= 12
    few = dict(list(tried.items())[:2])
    best = tune(bench, few, setting, [PROMPT])
    plan = bench.plan(setting)
    add_tuned(bench, plan, family, best, tried[best], setting)
    assert plan.roles[family] == best
    record = plan.methods[best](PROMPT, 0, "")
    assert record.tokens >= 11 and record.nodes >= record.steps


@pytest.mark.parametrize("setting", [SETTING, GREEDY], ids=str)
def test_draft_trees_and_n_grams_of_all_sizes_write_the_targets_greedy_text(bench, setting):
    """Under greedy decoding all of them write one text; under sampling each runs with a rule that
    takes its trees.
    """
    plan, texts = bench.plan(setting), []
    for tried in (
        candidates(bench, "draft trees", "traversal", setting),
        ngram_candidates(bench, NgramConfig()),
    ):
        for title, own in tried.items():
            texts.append(
                [
                    t
                    for block in own.method(bench, title, setting).blocks(PROMPT, 0)
                    for t in block.tokens
                ]
            )
    plain = [
        token
        for block in plan.methods["autoregressive"].blocks(PROMPT, 0)
        for token in block.tokens
    ]
    assert len(texts) == 24 and all(len(text) == len(plain) for text in texts)
    assert setting != GREEDY or all(text == plain for text in texts)


def test_n_grams_are_mixed_with_the_best_static_tree_and_with_a_selector_that_chooses(bench):
    plan = bench.plan(SETTING)
    assert not mixed_candidates(
        bench, NgramConfig(), "selector", "traversal", SETTING
    )  # no selector was added
    assert not mixed_candidates(bench, NgramConfig(), "static", "traversal", GREEDY)  # no labels
    tried = mixed_candidates(bench, NgramConfig(), "static", "traversal", SETTING)
    assert len(tried) == 12 and all(title.endswith("+ Traversal (2, 0, 3)") for title in tried)
    title, own = next(iter(tried.items()))
    assert isinstance(own.policy, Mixed) and own.policy.rule is VERIFIERS["traversal"]
    add_tuned(bench, plan, mixed_role("static", "traversal"), title, own, SETTING)
    assert plan.roles[f"{NGRAM} + Traversal, best static"] == title
    assert plan.methods[title](PROMPT, 0, "").tokens >= 11
    assert [mixed_role(what, "traversal") for what in MIXED_FAMILIES][
        1
    ] == f"{NGRAM} + {selector_title('traversal')}"


def test_an_online_estimate_begins_where_the_tuning_prompts_left_it(bench):
    weights = learn_online(bench, "traversal", SETTING, [PROMPT, PROMPT[::-1]])
    assert len(weights) == 4 and weights != OnlineAcceptance(lambda tree, context: 1.0).weights
    bench.online_weights[SETTING] = weights
    tried = candidates(bench, "online acceptance", "traversal", SETTING)
    bench.online_weights.clear()
    assert all(own.policy.weights == weights for own in tried.values())


def test_static_trees_are_ranked_by_labels_and_taken_by_the_clock_where_they_were_timed(bench):
    """Labels: (2, 0, 3) commits 9 tokens, every other tree 1, so that among the others those of one
    draft pass cost least.
    """
    ranked = bench.predictions.ranked("traversal", SETTING, 3)
    assert (
        ranked[0] == bench.predictions.static("traversal", SETTING) == BEST["traversal"]
        and len(set(ranked)) == 3
    )
    assert all(tree.depth == 1 for tree in ranked[1:])
    assert bench.predictions.ranked("traversal", SETTING, 1, "code") == ranked[:1]
    assert bench.predictions.ranked("traversal", SETTING, 1, "tables") == []  # no roots
    bench.predictions.timed["traversal", SETTING] = ranked[2]
    assert bench.predictions.static("traversal", SETTING) == ranked[2]
    bench.predictions.timed.clear()


def test_greedy_text_is_drafted_from_what_an_unwarped_draft_is_sure_of(bench):
    tried = candidates(bench, "confidence", "traversal", GREEDY)
    assert all(isinstance(own.policy, ConfidenceStop) and own.policy.pick for own in tried.values())
    assert {own.rule for own in tried.values()} == {VERIFIERS["greedy"]}
    assert {own.rule for own in candidates(bench, "confidence", "traversal", SETTING).values()} == {
        VERIFIERS["traversal"]
    }


def test_trials_are_counted():
    assert (
        trial_count(12, 3) == 12 + 6 + 3
        and trial_count(12, 24) == 6 * (12 + 6 + 3 + 2)
        and trial_count(1, 9) == 0
    )
