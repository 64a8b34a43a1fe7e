"""Progress on long work: one rich bar with its rate and the time left."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

T = TypeVar("T")
console = Console()


class Rate(ProgressColumn):
    """Units a second. unit: None takes the task's own."""

    def __init__(self, unit: str | None = None):
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:.1f} {self.unit or task.fields['unit']}/s")


def track(items: Iterable[T], title: str, total: int, unit: str = "it", done: int = 0) -> Iterator[T]:
    """Yield `items` under a bar; `done` of `total` were finished by an earlier run."""
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task(title, total=total, completed=done, unit=unit)
        for item in items:
            yield item
            progress.advance(task)


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show what is being done where nothing can be counted: a spinner on a terminal, a line elsewhere."""
    if console.is_terminal:
        with console.status(f"[dim]{title} ...[/]"):
            yield
    else:
        console.print(f"[dim]{title} ...[/]")
        yield
