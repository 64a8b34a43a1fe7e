"""Recommend settings for an engine without a selector.

Example: `nde recommend run=NAME`.

It prints a table, and writes the configurations of vLLM and SGLang into the run's folder
`recommend`. With `acceptance` it reads no run: it prints what a draft of such numbers would win.
"""

from dataclasses import field
from typing import Annotated

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from pydantic import Field
from rich.box import SIMPLE
from rich.table import Table

from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import Count, Part, Place, Text, one_of, settings
from nde_talf.evaluation.speed_estimate import Prices
from nde_talf.pipelines.commands.work import work_of
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.schema import MEASURED, PathsConfig
from nde_talf.pipelines.runs.finished import Run

BATCHES = (1, 4, 16, 64, 256)
STOPS = "By these prices drafting stops paying at a batch of {}."


@settings()
class RecommendConfig:
    """Settings of a recommendation."""

    run: Text = "default"
    """Name of a run with traces and a latency table, which is its folder under paths.checkpoints.
    """
    setting: Annotated[str, one_of(SETTINGS)] | None = None
    """Sampling setting of the requests, one that was traced; null: all traced ones, equally often.
    """
    rejection: Annotated[str, one_of(("standard", "block"))] = "standard"
    """Verification of a path in the engine: standard, or block verification
    (rejection_sample_method=block in vLLM).
    """
    table: Place = MEASURED
    """Prices: measured (the run's own latency table), a profile of configs/latency, or a .json
    file.
    """
    acceptance: Part | None = None
    """Chance that a drafted token is accepted, for a table before anything is trained."""
    draft_price: Annotated[float, Field(ge=0, le=100)] = 0.05
    """With acceptance: the time of the draft's pass over a token, in passes of the target."""
    free_rows: Count = 200
    """With acceptance: tokens that the target scores in the time of one; about 200 on a GPU, 2 to 8
    on a CPU core.
    """
    paths: PathsConfig = field(default_factory=PathsConfig)


def recommend(config: RecommendConfig) -> None:
    """Print and write what is recommended.

    Raises UserError where traces or a table are missing, damaged, or of another pair.
    """
    if config.acceptance is not None:
        prices = Prices(config.acceptance, config.draft_price, config.free_rows)
        console.print(_before_training(prices))
        return
    run = Run(config.run, config.paths.checkpoints)
    quiet()
    work_of("recommend").recommend_from(config, run)


def _before_training(prices: Prices) -> Table:
    """Say what the numbers are, and tabulate the best path by batch size."""
    console.print(
        f"A path of drafted tokens, each accepted with chance {prices.acceptance:g}. The draft's"
        f" pass takes {prices.draft_price:g} of the target's, which scores {prices.free_rows}"
        f" tokens in the time of one. {STOPS.format(prices.first_without_gain())} The measured"
        " table of a run: nde recommend run=NAME.",
        soft_wrap=True,
    )
    table = Table("batch", "best to draft", "tokens\na step", "over plain", box=SIMPLE)
    for batch in BATCHES:
        length, tokens, speedup = prices.best_path(batch)
        table.add_row(str(batch), str(length or "nothing"), f"{tokens:.2f}", f"{speedup:.2f}")
    return table


def main() -> None:
    """The command `nde recommend`."""
    launch("recommend", RecommendConfig, recommend)


if __name__ == "__main__":
    main()
