"""The run that the papers are measured on: its pair, its prompts, its latency table, and the folder
of what was measured.

Everything measured is kept in `<run>/papers/<pair>`, where <pair> is a checksum of the pair, so
that a command goes on where another one stopped and nothing of an older pair is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nde_talf.data.text.pair import Pair
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import checksum
from nde_talf.decoding.model import CausalModel
from nde_talf.evaluation.papers.resampled import Prompts
from nde_talf.evaluation.speed import CPU, WALL
from nde_talf.selector.latency import LatencyTable


class OutOfTime(Exception):
    """The time given to a measurement is over; what it has is on disk."""


@dataclass(frozen=True)
class Bench:
    """Options of a command, and what follows from them.

    Attributes:
        run: folder of a finished run of the pipeline, as far as stage latency.
        count: prompts of each set; None: all of the test split.
        new_tokens: after each prompt; None: what a measurement does by itself.
        samples: super-trees at each root.
        device, dtype: of both models.
        head_steps: of the first head's training, and of each loss's after it.
        heads: folder of `benchmarks.heads`, whose heads are taken instead.
    """

    run: Path
    count: int | None = None
    new_tokens: int | None = None
    samples: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    head_steps: tuple[int, int] = (250, 120)
    heads: Path | None = None

    @cached_property
    def pair(self) -> Pair:
        if not (self.run / "pair" / "pair.json").exists():
            raise UserError(
                f"--run {self.run}: it holds no pair. Make one: python -m pipelines.run model=paper"
                " stage=pair."
            )
        return Pair(self.run / "pair")

    @cached_property
    def folder(self) -> Path:
        found = self.run / "papers" / checksum(self.pair.folder / "pair.json")[:8]
        found.mkdir(parents=True, exist_ok=True)
        return found

    @cached_property
    def prompts(self) -> Prompts:
        """`count` prompts of every set of the test split, the sets in turn."""
        return Prompts.in_turn(
            (prompt for prompt in self.pair.every_prompt() if prompt.split == "test"), self.count
        )

    @property
    def sets(self) -> list[str]:
        return self.prompts.sets

    @cached_property
    def models(self) -> tuple[CausalModel, CausalModel]:
        return self.pair.models(self.device, self.dtype)

    @cached_property
    def table(self) -> LatencyTable:
        path = self.run / "latency" / "table.json"
        if not path.exists():
            raise UserError(
                f"--run {self.run}: it holds no latency table, which prices trees. Measure it with"
                " all rules: python -m pipelines.run stage=latency traces=nde, with the options"
                " that made the pair."
            )
        return LatencyTable.load(path)

    @property
    def clock(self) -> str:
        """Field of a record: CPU time on a CPU, which other work on the machine disturbs less; else
        wall time.
        """
        return CPU if self.device == "cpu" else WALL

    def tokens(self, usual: int) -> int:
        """New tokens of a measurement that usually takes `usual`."""
        return self.new_tokens or usual


@dataclass(frozen=True)
class Work:
    """A measurement that takes time.

    Attributes:
        name: by which tables ask for it.
        seconds: a rough estimate of what is left of it.
        run: does it up to a deadline (of `time.monotonic`), from where it stopped; raises OutOfTime
            if that comes first.
        prompts: those measured so far; None where a measurement has none.
    """

    name: str
    seconds: Callable[[], float]
    run: Callable[[float], None]
    prompts: Callable[[], Prompts] | None = None


def carry_out(works: list[Work], minutes: float, say: Callable[[str], object]) -> None:
    """Run measurements one after the other, those that are not finished.

    Each may take its part of what is left of `minutes`, by the estimates; 0 minutes: none is run.
    """
    end = time.monotonic() + 60 * minutes
    for number, work in enumerate(works):
        if not minutes or not work.seconds():
            continue
        now, estimates = time.monotonic(), [max(own.seconds(), 1.0) for own in works[number:]]
        try:
            work.run(now + (end - now) * estimates[0] / sum(estimates))
        except OutOfTime:
            say(
                f"{work.name}: its part of {minutes:g} minutes is over; the same command goes on"
                " from here."
            )
