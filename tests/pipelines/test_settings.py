"""Every key says what it may be, and a wrong key or value is refused in a sentence."""

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.check import CheckConfig
from nde_talf.pipelines.cli import composed
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.generate import GenerateConfig
from nde_talf.pipelines.recommend import RecommendConfig

SCHEMAS = {
    "config": Config,
    "generate": GenerateConfig,
    "recommend": RecommendConfig,
    "check": CheckConfig,
}


@pytest.mark.parametrize("config", SCHEMAS)
def test_the_defaults_compose(config):
    assert composed(SCHEMAS[config], config=config).paths.checkpoints == "checkpoints"


@pytest.mark.parametrize(
    "override,sentence",
    [
        ("draft.loss.k=0", "draft.loss.k=0: it should be greater than or equal to 1"),
        ("selector.pricing=eq12", "selector.pricing=eq12: there is none; choose from table, eq11"),
        ("selector.lr=nan", "selector.lr=nan: it should be a finite number"),
        ("traces.settings=[t9]", "traces.settings[0]=t9: there is none; choose from t0.2"),
        ("model.device=gpu", "model.device=gpu: it must be cpu, cuda or cuda:N"),
        ("evaluation.policies.slaf.k=3", "evaluation.policies.slaf=slaf: there is none"),
        ("data.mix.mine.sourc=x", "Did you mean data.mix.NAME.source?"),
        (f"data.source={'x' * 300}", "(300 characters): it must be a text of at most 255"),
        ("+model.tensor_parallel=2", "this key is gone; model.device_map=auto lays the target"),
        ("data.mix.code.draft_fractions=1", "Did you mean data.mix.NAME.draft_fraction?"),
        ("+nonsense=1", "nonsense: there is no such key."),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_a_sentence(override, sentence):
    with pytest.raises(UserError) as told:
        composed(Config, override)
    assert sentence in str(told.value)


def test_numbers_become_texts_and_integers_floats_where_the_key_says_so():
    config = composed(Config, "run=1", "selector.lr=1", "evaluation.draft_temperature=0.6")
    assert (config.run, config.selector.lr) == ("1", 1.0) and isinstance(config.selector.lr, float)
    assert config.evaluation.draft_temperature == "0.6"
