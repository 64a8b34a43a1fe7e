"""Values that no stage could use are refused before any work, by name."""

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.checks import check_config, check_machine
from nde_talf.pipelines.config import Config


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


@pytest.mark.parametrize(
    "group,key,value",
    [
        ("traces", "shard_prompts", 0),
        ("data", "prompt_tokens", [40, 30]),
        ("latency", "contexts", [0]),
        ("selector", "verifiers", ["nss"]),
        ("evaluation", "calibration_prompts", 17),
        ("evaluation", "settings", ["t0.4"]),
        ("selector", "tables", ["nowhere"]),
        ("evaluation", "policies", {"salf": 32}),
        ("evaluation", "draft_temperature", "cold"),
        ("dialogues", "source", "nowhere/chats.jsonl"),
    ],
)
def test_bad_values_are_named(group, key, value):
    config = Config()
    setattr(getattr(config, group), key, value)
    with pytest.raises(UserError, match=f"{group}.{key}"):
        check_config(config)


@pytest.mark.parametrize("name", ["../x", ".", "", "/tmp/x", ".hidden", "-x", "a b", "a" * 101])
def test_a_run_name_that_is_no_name_of_a_folder_is_refused(name):
    with pytest.raises(UserError, match=r"letters .* digits, dashes, underscores and dots"):
        Config(run=name)
    config = Config()
    config.run = name
    with pytest.raises(UserError, match="run="):
        check_config(config)
