"""What a command line imports, for the server that `launch` forks from; no test imports this
itself.
"""

# ruff: noqa: E402, F401

import os

from tests.pipelines.micro import environment

os.environ.update(environment())
os.dup2(
    os.open(os.devnull, os.O_WRONLY), 1
)  # the console made below must not take this for a terminal

import nde_talf.pipelines.commands.quiet  # isort: skip (before torch)

import matplotlib.backends.backend_agg
import wandb.sdk.launch.inputs.internal

import nde_talf.pipelines.commands.compare_texts
import nde_talf.pipelines.commands.generate
import nde_talf.pipelines.config.checks
import nde_talf.pipelines.config.command_line
import nde_talf.pipelines.stages.run_stages
