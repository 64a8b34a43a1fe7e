"""What the command line tells about bad input, found in this process: starting another takes
several seconds.
"""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import nde_talf.pipelines.run
from nde_talf.decoding.common.errors import UserError
from tests.pipelines.micro import ROOT, command


def refused(folder, *overrides: str, name: str = "config", how=nde_talf.pipelines.run.run) -> str:
    """The message that a micro run with `overrides` ends with, as one line."""
    asked = command(folder, *overrides)[3:] if name == "config" else list(overrides)
    with pytest.raises(UserError) as told:
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            config = OmegaConf.to_object(compose(name, asked))
        how(config)
    return " ".join(str(told.value).split())
