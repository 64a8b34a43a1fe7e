"""The command `python -m recipes.small step=train`; see `recipes.small.steps`."""

from nde_talf.pipelines.commands.signals import leave_at_once  # isort: skip (before what takes time)

if __name__ == "__main__":
    leave_at_once()

from nde_talf.pipelines.config.command_line import launch
from recipes.small.steps import SmallConfig, run

if __name__ == "__main__":
    launch("small", SmallConfig, run)
