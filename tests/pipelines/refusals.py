"""What the command line tells about bad input, found in this process: starting another takes
several seconds.
"""

import pytest

import nde_talf.pipelines.run
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.cli import composed
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.generate import GenerateConfig
from nde_talf.pipelines.recommend import RecommendConfig
from tests.pipelines.micro import command

SCHEMAS = {"config": Config, "generate": GenerateConfig, "recommend": RecommendConfig}


def refused(folder, *overrides: str, name: str = "config", how=nde_talf.pipelines.run.run) -> str:
    """The message that a micro run with `overrides` ends with, as one line."""
    asked = command(folder, *overrides)[3:] if name == "config" else list(overrides)
    with pytest.raises(UserError) as told:
        how(composed(SCHEMAS[name], *asked, config=name))
    return " ".join(str(told.value).split())
