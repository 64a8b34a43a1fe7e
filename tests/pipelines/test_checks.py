"""What settings mean, and what is told before any work."""

import pytest

from nde_talf.pipelines.config.checks import check_config
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from tests.refusal import refusal


@pytest.mark.parametrize(
    "given, drafter, labels",
    [
        ([], "lm", "text"),
        (["model.target=t/t"], "head", "trees"),
        (["model.target=t/t", "traces=text"], "head", "trees"),
        (["model.target=t/t", "model.draft=d/d"], "lm", "text"),
        (["traces.drafter=head"], "head", "trees"),
        (["model.target=t/t", "model.device_map=auto"], "nobody", "trees"),
    ],
)
def test_a_head_drafts_where_no_draft_model_does_and_is_trained_first(given, drafter, labels):
    # greedy decoding need not be traced
    config = composed(Config, *given, "evaluation.settings=[t0,t0.6]")
    assert (config.drafter, config.traces.labels) == (drafter, labels)
    first, others = ("pair", "draft"), ("latency", "traces", "selector")
    head = (*first, *others, "evaluate")
    assert config.stages == (head if drafter == "head" else ("pair", *others, "draft", "evaluate"))
    assert (config.traces.train_prompts > 28) == (config.traces.labels == "text")
    check_config(config)


@pytest.mark.parametrize(
    "given, told",
    [
        ("traces.drafter=lm", "there is no draft model. Leave the key out"),
        ("traces.labels=text", "labels are for a draft model, and here the head drafts"),
        ("traces.drafter=nobody stage=traces", "stage=traces: nothing drafts"),
    ],
)
def test_what_a_target_alone_cannot_have_is_told_before_any_work(given, told):
    config = composed(Config, "model.target=t/t", *given.split())
    with refusal(told):
        check_config(config)


def test_numbers_become_texts_and_integers_floats_where_the_key_says_so():
    config = composed(Config, "run=1", "selector.lr=1", "evaluation.draft_temperature=0.6")
    assert (config.run, config.selector.lr) == ("1", 1.0) and isinstance(config.selector.lr, float)
    assert config.evaluation.draft_temperature == "0.6"
