"""Prove on one's own pair that speculative and plain decoding agree: `nde check run=NAME`."""

import sys
from typing import Annotated

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from pydantic import Field

from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import settings
from nde_talf.pipelines.commands.generate import DecodingConfig
from nde_talf.pipelines.commands.work import work_of
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.runs.finished import Run

SHORTEST, FEWEST = 4, 100
"""Tokens of a text, and of all texts together, that a check needs at least."""


@settings()
class CheckConfig(DecodingConfig):
    """A run's pair as it decodes, and the number of texts that are compared."""

    texts: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Texts that are sampled, after held-out prompts of the run; an eighth as many are greedy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature:
            raise UserError("temperature=0: leave it out. Greedy texts are always compared.")
        if self.new_tokens < SHORTEST or self.texts * self.new_tokens < FEWEST:
            raise UserError(
                f"texts={self.texts} new_tokens={self.new_tokens}: that is too little to find a"
                f" bias by. Give texts of {SHORTEST} tokens or more, and {FEWEST} tokens in all."
            )


def check(config: CheckConfig) -> None:
    """Print what agrees. Exits with status 1 where something does not."""
    run = Run(config.run, config.paths.checkpoints)
    check_device(config.model.device)
    quiet()
    results = work_of("check").compare_texts(config, run)
    for _, sentence in results:
        console.print(sentence)
    if not all(passed for passed, _ in results):
        sys.exit(1)


def main() -> None:
    """The command `nde check`."""
    launch("check", CheckConfig, check)


if __name__ == "__main__":
    main()
