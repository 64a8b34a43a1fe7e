"""The report: one self-contained HTML page, its plots as PNGs beside it, all numbers as JSON, and the terminal's table."""

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from html import escape
from io import BytesIO
from pathlib import Path
from string import Template

from rich.box import SIMPLE
from rich.table import Table

from data.files import write_atomically, write_json
from decoding.loop import PHASES
from evaluation.ablations import learning_curves, tails
from evaluation.bootstrap import shown
from evaluation.markdown import markdown
from evaluation.plots import (
    Curves,
    Tables,
    acceptance_curves,
    action_histogram,
    choice_by_entropy,
    loss_curves,
    phase_shares,
    selector_ratios,
    speed_bars,
)
from evaluation.table import Row

COLUMNS = ("method", "block efficiency", "tokens/s", "speedup", "tree nodes", *PHASES)
TEMPLATE = Path(__file__).with_name("report.html")


@dataclass
class ReportData:
    """What the report shows; an empty part is left out. pair: held-out figures of the pair; offline: the judge's report by
    selector and latency table; ablations: of stage=ablations; head: the draft head's; acceptance: rates by setting, solver
    and depth; chosen, static: the selector's actions and the static one by setting; versus: of `evaluation.versus` by
    method; stages: seconds by stage."""

    run: str
    tables: Tables
    pair: dict = field(default_factory=dict)
    offline: dict = field(default_factory=dict)
    head: dict = field(default_factory=dict)
    ablations: dict[str, dict] = field(default_factory=dict)
    acceptance: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)
    chosen: dict[str, dict[str, int]] = field(default_factory=dict)
    static: dict[str, tuple] = field(default_factory=dict)
    versus: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def cells(row: Row) -> list[str]:
    """A row as text, in the order of COLUMNS; what was not measured is a dash."""
    efficiency, speedup = row.block_efficiency, row.speedup
    return [
        row.method,
        shown(efficiency),
        f"{row.tokens_per_second:.0f}",
        f"{speedup[0]:.2f}× [{speedup[1]:.2f}, {speedup[2]:.2f}]",
        f"{row.nodes:.1f}" if row.nodes else "–",
        *(f"{100 * row.shares[phase]:.0f} %" if row.shares else "–" for phase in PHASES),
    ]


def render_table(tables: Tables) -> list[Table]:
    """One terminal table a setting, 80 columns wide: half-widths of the intervals, shares of step time in one column."""
    rendered = []
    for setting, rows in tables.items():
        table = Table("method", title=setting, title_justify="left", title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0))
        for column in ("block eff.", "tok/s", "speedup", "nodes", "/".join(phase[0] for phase in PHASES) + " %"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            efficiency, (speedup, low, high) = row.block_efficiency, row.speedup
            table.add_row(
                row.method,
                f"{efficiency[0]:.2f}±{(efficiency[2] - efficiency[1]) / 2:.2f}",
                f"{row.tokens_per_second:.0f}",
                f"{speedup:.2f}×±{(high - low) / 2:.2f}",
                f"{row.nodes:.1f}" if row.nodes else "–",
                "/".join(f"{100 * row.shares[phase]:.0f}" for phase in PHASES) if row.shares else "–",
                style="bold" if "NDE" in row.method or "TALF" in row.method else None,
            )
        rendered.append(table)
    return rendered


def markdown_table(rows: list[Row]) -> str:
    """The same for a README, without the shares."""
    return markdown(COLUMNS[:5], (cells(row)[:5] for row in rows))


def write_report(data: ReportData, folder: Path) -> Path:
    """Write `results.json`, the PNGs and `index.html` into `folder`; returns the page's path."""
    figures = {"speedup": speed_bars(data.tables), "phases": phase_shares(data.tables)}
    if data.chosen:
        figures["actions"] = action_histogram(data.chosen, data.static)
    if data.offline:
        figures["selector"] = selector_ratios(data.offline)
        figures["entropy"] = choice_by_entropy(data.offline)
    if data.ablations:
        figures["learning"] = learning_curves(data.ablations)
        figures["tail"] = tails(data.ablations)
    if data.acceptance:
        figures["acceptance"] = acceptance_curves(data.acceptance)
    if data.curves:
        figures["curves"] = loss_curves(data.curves)
    images = {}
    for name, figure in figures.items():
        buffer = BytesIO()
        figure.savefig(buffer, format="png")
        images[name] = buffer.getvalue()
        write_atomically(folder / f"{name}.png", lambda path, image=images[name]: path.write_bytes(image))
    write_json(folder / "results.json", {k: v for k, v in asdict(data).items() if k != "curves"})
    (folder / "results.md").write_text("\n\n".join(f"{s}\n\n{markdown_table(rows)}" for s, rows in data.tables.items()) + "\n")
    page = Template(TEMPLATE.read_text()).substitute(run=escape(data.run), body="\n".join(_sections(data, images)))
    write_atomically(folder / "index.html", lambda path: path.write_text(page))
    return folder / "index.html"


def _sections(data: ReportData, images: dict[str, bytes]) -> Iterable[str]:
    captions = {
        "speedup": "Speedup by method. Blue: learned here.",
        "actions": "Trees the selector chose while decoding. Orange: the best static tree.",
        "phases": "Where the time of a step goes.",
        "selector": "The selectors offline, on prompts they were not trained on. Grey: choosing root by root, between choosing "
        "on one half of the super-trees and scoring on the other (noisy labels: an underestimate) and choosing and scoring on "
        "the same (an overestimate).",
        "learning": "The selector with less data.",
        "tail": "Worst roots: the selector's tokens/s against the best static tree, with and without the tail term.",
        "entropy": "What a selector drafts, by how sure the draft is of the next token.",
        "acceptance": "How often one of four draws is accepted, by solver, beside the most that any solver could (dashed).",
        "curves": "Training.",
    }
    for setting, rows in data.tables.items():
        yield f"<h2>{escape(setting)}</h2>" + _table(COLUMNS, [cells(row) for row in rows])
    for method, others in data.versus.items():
        yield f"<h2>{escape(method)}: tokens/s against</h2>" + _table(*_versus_rows(others))
    for name, caption in captions.items():
        if name in images:
            encoded = base64.b64encode(images[name]).decode()
            yield f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{encoded}">'
            yield f"<figcaption>{escape(caption)}</figcaption></figure>"
    for title, numbers in (
        ("The pair, on held-out text", data.pair),
        ("The draft head, on held-out text", data.head),
        ("Seconds by stage", data.stages),
        ("Environment", data.environment),
    ):
        if numbers:
            yield f"<h2>{escape(title)}</h2>" + _table(("", ""), list(_flat(numbers)))


def _versus_rows(others: dict[str, dict[str, list[float]]]) -> tuple[list[str], list[list[str]]]:
    settings = list(dict.fromkeys(setting for ratios in others.values() for setting in ratios))
    rows = [[other, *(shown(ratios.get(setting), 3) for setting in settings)] for other, ratios in others.items()]
    return ["", *settings], rows


def render_offline(report: dict[str, dict]) -> Table:
    """Held-out tokens/s against the best static trees, in the terminal, 80 columns wide."""
    columns = {"static_domain": "by domain", "entropy_rule": "entropy", "traversal_static": "traversal"}
    table = Table(title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.title = "held-out tokens/s against the selector's own best static trees"
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


def render_versus(versus: dict[str, dict[str, dict[str, list[float]]]]) -> list[Table]:
    """One terminal table for each method that is compared with others."""
    rendered = []
    for method, others in versus.items():
        columns, rows = _versus_rows(others)
        table = Table(*columns, title=f"{method}: tokens/s against", title_justify="left", title_style="bold", box=SIMPLE)
        for row in rows:
            table.add_row(*row)
        rendered.append(table)
    return rendered


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _flat(numbers: dict, prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in numbers.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}, ")
        elif isinstance(value, list):
            yield (
                name,
                ", ".join(map(_number, value))
                if not any(isinstance(v, list) for v in value)
                else json.dumps([[round(x, 3) for x in v] for v in value]),
            )
        else:
            yield name, _number(value)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
