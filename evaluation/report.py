"""The report: one self-contained HTML page, its pictures as PNGs beside it, and all numbers as
JSON.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nde_talf.decoding.common.files import write_atomically, write_json
from nde_talf.evaluation.pictures import Picture, pictures
from nde_talf.evaluation.plots import Curves, Tables, svg
from nde_talf.evaluation.protocol import PROTOCOL
from nde_talf.evaluation.sections import cells, sections, selector_intro
from nde_talf.evaluation.table import Row, acceptance_by_position
from nde_talf.evaluation.terminal import render_offline
from nde_talf.evaluation.text import markdown
from nde_talf.evaluation.verdict import Verdict

__all__ = ["ReportData", "markdown_table", "render_offline", "results", "write_report"]

COLUMNS = ("method", "block efficiency", "tokens/s", "speed-up", "tree nodes")
TEMPLATE = Path(__file__).with_name("report.html")


@dataclass
class ReportData:
    """What the report shows; an empty part is left out.

    Attributes:
        run: name of the run.
        tables: rows by setting.
        verdicts: by setting.
        measured: how much was decoded, in words.
        learned: by setting, names of methods with something learned.
        same: by setting, methods not decoded, and what each is the same as.
        exports: by setting, for selectors that exported a static tree, its method.
        kinds: by setting and domain, rows.
        versus: by method, see `nde_talf.evaluation.speed.versus`.
        histograms: by setting and method, steps by accepted tokens.
        spec_decode: by setting and method, vLLM's counters.
        latencies: by setting and method.
        chosen: by setting and selector, steps by tree.
        static: by setting and selector, the best static action.
        sample: a decoded text.
        pair: held-out figures of the pair.
        offline: by selector and latency table, see `nde_talf.selector.evaluate`.
        head: held-out figures of the draft head.
        acceptance: by setting and solver, rates by depth.
        curves: by training, its series.
        stages: seconds by stage.
        environment: what it was measured with.
    """

    run: str
    tables: Tables
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    measured: str = ""
    learned: dict[str, list[str]] = field(default_factory=dict)
    same: dict[str, dict[str, str]] = field(default_factory=dict)
    exports: dict[str, dict[str, str]] = field(default_factory=dict)
    kinds: dict[str, dict[str, list[Row]]] = field(default_factory=dict)
    versus: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    histograms: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    spec_decode: dict[str, dict[str, dict]] = field(default_factory=dict)
    latencies: dict[str, dict[str, dict]] = field(default_factory=dict)
    chosen: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    static: dict[str, dict[str, str]] = field(default_factory=dict)
    sample: dict[str, Any] = field(default_factory=dict)
    pair: dict = field(default_factory=dict)
    offline: dict = field(default_factory=dict)
    head: dict = field(default_factory=dict)
    acceptance: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def positions(self) -> dict[str, dict[str, list[float]]]:
        """Acceptance by position, by setting and method."""
        found = {
            s: {m: acceptance_by_position(counts) for m, counts in own.items()}
            for s, own in self.histograms.items()
        }
        return {
            s: own
            for s, methods in found.items()
            if (own := {m: rates for m, rates in methods.items() if rates})
        }


def results(data: ReportData) -> dict:
    """All numbers, for results.json and the terminal."""
    content = {
        name: value for name, value in asdict(data).items() if name not in ("curves", "sample")
    }
    summary = [verdict.sentence for verdict in data.verdicts.values()]
    return {"run": content.pop("run"), "summary": summary, "protocol": list(PROTOCOL), **content}


def markdown_table(rows: list[Row]) -> str:
    """A setting's table for a README."""
    return markdown(COLUMNS, ([cells(row)[column] for column in COLUMNS] for row in rows))


def write_report(data: ReportData, folder: Path) -> Path:
    """Write `results.json`, `results.md`, the PNGs and `index.html` into `folder`; returns the
    page's path.
    """
    drawn = pictures(data)
    for picture in drawn:
        write_atomically(
            folder / f"{picture.name}.png",
            partial(picture.draw(picture.full).savefig, format="png"),
        )
    write_json(folder / "results.json", results(data))
    lines = [*(verdict.sentence for verdict in data.verdicts.values())]
    lines += [f"{setting}\n\n{markdown_table(rows)}" for setting, rows in data.tables.items()]
    write_atomically(folder / "results.md", lambda path: path.write_text("\n\n".join(lines) + "\n"))
    page = render(data, drawn)
    write_atomically(folder / "index.html", lambda path: path.write_text(page, encoding="utf-8"))
    return folder / "index.html"


def render(data: ReportData, drawn: list[Picture]) -> str:
    """The page."""
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found: dict[str, list] = {}  # by section: (name, [(title, SVG)])
    for picture in drawn:
        panels = [
            (t, Markup(svg(own, f"{picture.name}-{i}")))
            for i, (t, own) in enumerate(picture.panels().items())
        ]
        found.setdefault(picture.section, []).append((picture.name, panels))
    return template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        data=data,
        tables=sections(data),
        selector=selector_intro(data),
        pictures=found,
        protocol=PROTOCOL,
    )
