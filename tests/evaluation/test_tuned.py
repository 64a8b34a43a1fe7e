"""Baselines with a parameter: what is tried, and that the fastest is taken and decodes."""

import pytest

from decoding.policies.stopping import ConfidenceStop
from decoding.sampling import SamplingSetting
from evaluation.methods import Bench
from evaluation.tuned import FAMILIES, add_tuned, candidates, rule_of, tune
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
    best = tune(bench, few, "traversal", setting, [PROMPT])
    plan = bench.plan(setting)
    add_tuned(bench, plan, best, tried[best], "traversal", setting)
    record = plan.methods[f"Traversal, {best}"](PROMPT, 0, "")
    assert record.tokens >= 11 and record.nodes >= record.steps


def test_greedy_text_is_drafted_from_what_an_unwarped_draft_is_sure_of(bench):
    tried = candidates(bench, "confidence", "traversal", GREEDY)
    assert all(isinstance(policy, ConfidenceStop) and policy.pick for policy in tried.values())
    assert rule_of("traversal", GREEDY) == "greedy" and rule_of("traversal", SETTING) == "traversal"
