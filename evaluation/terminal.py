"""The report in the terminal, 80 columns wide, from the `results.json` of a finished run."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from nde_talf.decoding.common.bootstrap import times

STYLE: dict[str, Any] = {"title_justify": "left", "box": SIMPLE, "padding": (0, 1, 0, 0)}
COLUMNS = {"block\neff.": 5, "tokens\n/s": 6, "speed-up": 18, "in CPU\ntime": 6}


def render_results(results: dict[str, Any]) -> Iterator[Table | Text]:
    """A table and the verdict for every setting. results: what `report` writes as JSON."""
    for setting, rows in results["tables"].items():
        verdict, learned = results["verdicts"][setting], results["learned"].get(setting, ())
        yield methods_table(setting, rows, learned, verdict["clock"])
        for name, other in results["same"].get(setting, {}).items():
            yield Text(f" {name}: the same as {other}", style="dim")
        style = {True: "bold green", False: "bold red", None: "yellow"}[verdict["speculate"]]
        yield Text(f" {verdict['sentence']}", style=style)
        if verdict["clock_note"]:
            yield Text(f" {verdict['clock_note']}\n", style="dim")


def methods_table(
    setting: str, rows: list[dict[str, Any]], learned: list[str], clock: str
) -> Table:
    """One row a method; learned ones are bold."""
    note = f"   {clock}" if clock != "trusted" else ""
    table = Table("method", title=setting + note, title_style="bold", **STYLE)
    on_cpu = any(row["cpu_speedup"] for row in rows)
    for column, width in list(COLUMNS.items())[: 4 if on_cpu else 3]:
        table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        cells = [
            f"{row['block_efficiency'][0]:.2f}",
            f"{row['tokens_per_second']:.0f}",
            times(row["speedup"]),
        ]
        if on_cpu:
            cells.append(f"{row['cpu_speedup'][0]:.2f}×" if row["cpu_speedup"] else "–")
        style = "bold" if row["method"] in learned else None
        table.add_row(row["method"], *cells, style=style)
    return table


def render_offline(report: dict[str, dict]) -> Table:
    """Held-out tokens/s of selectors against the best static trees."""
    title = "held-out tokens/s against the selector's own best static trees"
    table = Table(title=title, **STYLE)
    for column, width in (("selector", None), ("latency", None), ("NDE", 11), ("root by root", 12)):
        table.add_column(column, no_wrap=True, min_width=width)  # names may be cut, figures not
    for name, tables in report.items():
        for latency, figures in tables.items():
            (value, low, high), bounds = figures["all"]["selector"], figures["all"]
            possible = f"{bounds['split_half'][0]:.2f}–{bounds['same_half'][0]:.2f}"
            table.add_row(name, latency, f"{value:.3f}±{(high - low) / 2:.3f}", possible)
    return table
