"""The report in the terminal, 80 columns wide: rendered from `results.json`, so that a finished run
can show it again.
"""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.evaluation.protocol import NOT_TRUSTED
from nde_talf.evaluation.table import Row

STYLE = {"title_justify": "left", "box": SIMPLE}
COLUMNS = {"block\neff.": 5, "tokens\n/s": 6, "speed-up": 18, "in CPU\ntime": 6}


def render_results(results: dict) -> Iterator[Table | Text]:
    """results: what `nde_talf.evaluation.report` writes as JSON, of an older version too.

    A table and the verdict for every setting, then each selector against other methods.
    """
    verdicts, same = results.get("verdicts", {}), results.get("same", {})
    for setting, rows in results["tables"].items():
        own, learned = verdicts.get(setting), set(results.get("learned", {}).get(setting, ()))
        yield methods_table(
            setting, [Row(**row) for row in rows], learned, own["clock"] if own else "trusted"
        )
        for name, other in same.get(setting, {}).items():
            yield Text(f" {name}: the same as {other}", style="dim")
        if own:
            yield Text(
                f" {own['sentence']}",
                style={True: "bold green", False: "bold red", None: "yellow"}[own["speculate"]],
            )
            yield Text(f" {own['clock_note']}\n" if own.get("clock_note") else "", style="dim")
    doubtful = [setting for setting, own in verdicts.items() if own["clock"] != "trusted"]
    note = f"   {NOT_TRUSTED}: {', '.join(doubtful)}" if doubtful else ""
    for method, others in results.get("versus", {}).items():
        columns, rows = versus_rows(others)
        table = Table(
            *columns, title=f"{method}: tokens/s against{note}", title_style="bold", **STYLE
        )
        for row in rows:
            table.add_row(*row)
        yield table


def methods_table(setting: str, rows: list[Row], learned: set[str], clock: str) -> Table:
    """One row a method; learned ones are bold."""
    note = f"   {clock}" if clock != "trusted" else ""
    table = Table("method", title=setting + note, title_style="bold", padding=(0, 1, 0, 0), **STYLE)
    on_cpu = any(row.cpu_speedup for row in rows)
    for column, width in list(COLUMNS.items())[: 4 if on_cpu else 3]:
        table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        cells = [
            f"{row.block_efficiency[0]:.2f}",
            f"{row.tokens_per_second:.0f}",
            times(row.speedup),
        ]
        cells += [f"{row.cpu_speedup[0]:.2f}×" if row.cpu_speedup else "–"] if on_cpu else []
        table.add_row(row.method, *cells, style="bold" if row.method in learned else None)
    return table


def versus_rows(others: dict[str, dict[str, list[float]]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of one method's comparisons."""
    settings = list(dict.fromkeys(setting for ratios in others.values() for setting in ratios))
    rows = [
        [other, *(shown(ratios.get(setting), 3) for setting in settings)]
        for other, ratios in others.items()
    ]
    return ["method", *settings], rows


def render_offline(report: dict[str, dict]) -> Table:
    """Held-out tokens/s against the best static trees."""
    columns = {
        "static_domain": "by domain",
        "entropy_rule": "entropy",
        "traversal_static": "traversal",
    }
    title = "held-out tokens/s against the selector's own best static trees"
    table = Table(title=title, padding=(0, 1, 0, 0), **STYLE)
    for column in ("selector", "latency", "NDE", *columns.values(), "root by root"):
        width = {"NDE": 11, "root by root": 12}.get(column)  # names may be cut, figures may not
        table.add_column(column, no_wrap=True, min_width=width)
    for name, tables in report.items():
        for latency, own in tables.items():
            overall = own["all"]
            value, low, high = overall["selector"]
            cells = [f"{overall[c][0]:.3f}" if c in overall else "–" for c in columns]
            bounds = f"{overall['split_half'][0]:.2f}–{overall['same_half'][0]:.2f}"
            table.add_row(name, latency, f"{value:.3f}±{(high - low) / 2:.3f}", *cells, bounds)
    return table
