"""Progress on long work: a bar on a terminal; elsewhere a line every 30 seconds."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, TypeVar

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from nde_talf.decoding.common.errors import masked

EVERY = 30.0
"""Seconds between two lines where there is no terminal."""
T = TypeVar("T")


class Plain(Console):
    """A console that shows no secrets, and leaves it to the terminal to wrap texts."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print `objects`, texts among them masked."""
        options = {"soft_wrap": all(isinstance(o, str | Text) for o in objects)} | options
        super().print(*(masked(o) if isinstance(o, str) else o for o in objects), **options)


# Messages hold names and paths of a user, such as /data/[v2]/llama: nothing in them is markup or an
# emoji.
console = Plain(markup=False, emoji=False)


class Rate(bars.ProgressColumn):
    """Units a second."""

    def render(self, task: bars.Task) -> Text:
        """Format the rate of `task`, such as "12.3 prompts/s"."""
        return Text(f"{task.finished_speed or task.speed or 0:.1f} {task.fields['unit']}/s")


def track(
    items: Iterable[T], title: str, total: int, unit: str = "it", done: int = 0
) -> Iterator[T]:
    """Yield `items` under a bar; `done` of `total` were finished by an earlier run."""
    columns = (
        bars.TextColumn("{task.description}", style="bold", markup=False),
        bars.BarColumn(40),
        bars.MofNCompleteColumn(),
        Rate(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with (
        activity(title, total, unit, done) as now,
        bars.Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task(title, total=total, completed=done, unit=unit)
        for item in items:
            yield item
            progress.advance(task)
            now.done += 1


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show an activity that cannot be counted: a spinner on a terminal, a line elsewhere."""
    with activity(title):
        if console.is_terminal:
            with console.status(Text(f"{title} ...", style="dim")):
                yield
        else:
            console.print(f"{title} ...", style="dim")
            yield


@dataclass
class Activity:
    """Work in progress; `total` is 0 where it cannot be counted.

    tokens: that were made so far; 0 where none are.
    """

    title: str
    total: int = 0
    unit: str = ""
    done: float = 0
    tokens: int = 0
    note: str = ""
    """Figures at the end of the line."""

    def __post_init__(self) -> None:
        self.begun, self._before = time.monotonic(), self.done

    def line(self, within: "Activity | None" = None) -> str:
        """Say what is done, how long it took, and how long the rest will take at this rate.

        within: an activity inside this one, of a shard where shards are counted.
        """
        seconds = time.monotonic() - self.begun
        line = f"{self.title}: "
        if self.total:
            line += f"{self.done} of {self.total} {self.unit}s, "
        line += f"{duration(seconds)} so far"
        part = within.done / within.total if within and self.unit == "shard" else 0
        done = self.done + part
        if done > self._before:
            left = seconds / (done - self._before) * (self.total - done)
            line += f", about {duration(left)} to go"
        if self.tokens:
            line += f", {self.tokens / seconds:.0f} tokens/s"
        line += self.note
        return f"{line}; {within.line()}" if within else line


_activities: list[Activity] = []


@contextmanager
def activity(title: str, total: int = 0, unit: str = "", done: int = 0) -> Iterator[Activity]:
    """Let `reporting` print lines about what the block does."""
    now = Activity(title, total, unit, done)
    _activities.append(now)
    try:
        yield now
    finally:
        _activities.remove(now)


@contextmanager
def reporting(stage: str) -> Iterator[None]:
    """Print a line about the activities every so often.

    On a terminal, where bars show the rest, there is one only while tokens are made.
    """
    ended = Event()

    def report() -> None:
        while not ended.wait(EVERY):
            now = _activities[-2:]  # one copy: the other thread may remove it
            if not console.is_terminal or (now and now[-1].tokens):
                console.print(f"{stage}, {now[0].line(*now[1:])}" if now else whole.line())

    whole = Activity(stage)
    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def duration(seconds: float) -> str:
    """Write seconds as "40 s", "3 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
