"""Progress on long work: one rich bar with its rate and the time left."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

from rich import progress as bars
from rich.console import Console
from rich.highlighter import ReprHighlighter
from rich.text import Text
from rich.theme import Theme

from nde_talf.decoding.common.errors import masked

T = TypeVar("T")


class Marked(ReprHighlighter):
    """Colours numbers and paths, and the mark at the start of a line.

    A line "! ..." warns, and "✓ ..." reports something done.
    """

    highlights: ClassVar[list[str]] = [
        *ReprHighlighter.highlights,
        r"^(?P<warned>[!↻·])(?= )",
        r"^(?P<done>✓)(?= )",
    ]


class Plain(Console):
    """A console that shows no secrets."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print `objects`, texts among them masked."""
        super().print(*(masked(o) if isinstance(o, str) else o for o in objects), **options)


# Messages hold names and paths of a user, such as /data/[v2]/llama: nothing in them is markup or an
# emoji.
console = Plain(
    markup=False,
    emoji=False,
    highlighter=Marked(),
    theme=Theme({"repr.warned": "yellow", "repr.done": "green"}),
)


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
    with bars.Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total, completed=done, unit=unit)
        for item in items:
            yield item
            progress.advance(task)


def working(title: str) -> AbstractContextManager[object]:
    """Show an activity that cannot be counted: a spinner on a terminal, a line elsewhere."""
    if console.is_terminal:
        return console.status(Text(f"{title} ...", style="dim"))
    console.print(f"{title} ...", style="dim")
    return nullcontext()
