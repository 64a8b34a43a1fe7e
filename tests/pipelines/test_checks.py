"""What settings mean, and what is told before any work."""

from nde_talf.pipelines.checks import check_config
from nde_talf.pipelines.cli import composed
from nde_talf.pipelines.config import Config


def test_a_head_that_drafts_is_trained_before_it_is_traced():
    config = Config()
    assert config.stages == ("pair", "latency", "traces", "selector", "draft", "evaluate")
    config.traces.drafter = "head"
    config.model.target = "somewhere"  # and no draft model
    assert config.drafts
    assert config.stages == ("pair", "draft", "latency", "traces", "selector", "evaluate")
    config.evaluation.settings = ["t0", "t0.6"]  # greedy decoding need not be traced
    check_config(config)


def test_numbers_become_texts_and_integers_floats_where_the_key_says_so():
    config = composed(Config, "run=1", "selector.lr=1", "evaluation.draft_temperature=0.6")
    assert (config.run, config.selector.lr) == ("1", 1.0) and isinstance(config.selector.lr, float)
    assert config.evaluation.draft_temperature == "0.6"
