"""Values that no stage could use are refused before any work, by name."""

import numpy as np
import pytest

from nde_talf.data.traces.settings import TracesConfig
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.checks import check_config, check_machine
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.traces import nothing_to_choose


def test_a_head_that_drafts_is_trained_before_it_is_traced():
    config = Config()
    assert config.stages == ("pair", "latency", "traces", "selector", "draft", "evaluate")
    config.traces.drafter = "head"
    config.model.target = "somewhere"  # and no draft model
    assert (
        config.stages == ("pair", "draft", "latency", "traces", "selector", "evaluate")
        and config.drafts
    )
    config.stage = "traces"
    check_config(config)
    config.traces.drafter = "none"
    with pytest.raises(UserError, match=r"traces\.drafter=none"):
        check_config(config)


def test_a_pair_with_nothing_to_choose_is_told_the_reason():
    few = np.array([0.9])  # one root in ten that differs changes nothing
    assert "agree nearly everywhere (overlap 0.99" in nothing_to_choose([np.full(30, 0.02), few])
    assert "agree nearly nowhere" in nothing_to_choose([np.full(30, 1.98), few])
    assert nothing_to_choose([np.full(30, 0.02), np.full(30, 1.0)]) is None
    assert nothing_to_choose([]) is None


def test_labels_from_text_are_of_a_draft_model_and_of_rules_that_have_them():
    TracesConfig(labels="text", verifiers=["specinfer", "traversal"])
    for wrong in ({}, {"drafter": "head"}, {"draft_temperature": "raw"}):
        with pytest.raises(UserError, match=r"traces\.labels=text: .*traces\.labels=trees"):
            TracesConfig(
                **{"labels": "text", "verifiers": ["gbv"] if not wrong else ["traversal"], **wrong}
            )


def test_greedy_decoding_need_not_be_traced():
    config = Config()
    config.evaluation.settings = ["t0", "t0.6"]
    check_config(config)


def test_an_option_that_a_policy_does_not_have_is_refused_before_any_work():
    config = Config()
    config.evaluation.policies = {"dyspec": {"nodes": 8}, "salf": {"width": 3}}
    check_config(config)
    with pytest.raises(
        UserError,
        match=r"evaluation\.policies\.salf: options\.width: .* no such option; it has nodes",
    ):
        check_machine(config)
