"""What the command line tells about bad input, found in this process: starting another takes
several seconds.
"""

import pytest

import nde_talf.pipelines.run
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from tests.pipelines.micro import command


def refused(folder, *overrides):
    """The message that a micro run with `overrides` ends with, as one line."""
    with pytest.raises(UserError) as told:
        nde_talf.pipelines.run.run(composed(Config, *command(folder, *overrides)[3:]))
    return " ".join(str(told.value).split())
