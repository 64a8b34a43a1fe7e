"""The report: one self-contained HTML page, its pictures as PNGs beside it, and all numbers as JSON."""

from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from decoding.common.bootstrap import shown, times
from decoding.common.files import write_atomically, write_json
from evaluation.accepted import acceptance_by_position
from evaluation.markdown import markdown
from evaluation.pictures import Picture, pictures, together
from evaluation.plots import Curves, Tables, svg
from evaluation.protocol import PROTOCOL
from evaluation.sections import GLOSSARY, sections
from evaluation.table import Row
from evaluation.terminal import render_offline
from evaluation.verdict import Verdict

__all__ = ["ReportData", "markdown_table", "render_offline", "results", "write_report"]

COLUMNS = ("method", "block efficiency", "tokens/s", "speed-up", "tree nodes")
TEMPLATE = Path(__file__).with_name("report.html")


@dataclass
class ReportData:
    """What the report shows; an empty part is left out. By setting: tables; verdicts; learned: names of methods with something
    learned; same: methods not decoded, and what each is the same as; exports: of selectors that exported a static tree, its
    method; kinds: rows by domain; histograms: steps by accepted tokens and method; spec_decode: vLLM's counters by method;
    latencies: by method; predicted: (tokens, seconds) a step by method; chosen: steps by selector and tree; static: the best
    static option by selector; acceptance: rates by solver and depth.
    versus: of `evaluation.versus` by method; pair: held-out figures of the pair; offline: the judge's report by selector and
    latency table; ablations: of stage=ablations; head: the draft head's; stages: seconds by stage; sample: a decoded text;
    measured: how much was decoded, in words."""

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
    predicted: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    chosen: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    static: dict[str, dict[str, str]] = field(default_factory=dict)
    sample: dict[str, Any] = field(default_factory=dict)
    pair: dict = field(default_factory=dict)
    offline: dict = field(default_factory=dict)
    head: dict = field(default_factory=dict)
    ablations: dict[str, dict] = field(default_factory=dict)
    acceptance: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def positions(self) -> dict[str, dict[str, list[float]]]:
        """Acceptance by position, by setting and method."""
        found = {s: {m: acceptance_by_position(counts) for m, counts in own.items()} for s, own in self.histograms.items()}
        return {s: own for s, methods in found.items() if (own := {m: shares for m, shares in methods.items() if shares})}


def results(data: ReportData) -> dict:
    """All numbers, for results.json and the terminal."""
    content = {name: value for name, value in asdict(data).items() if name not in ("curves", "sample")}
    summary = [verdict.sentence for verdict in data.verdicts.values()]
    return {"run": content.pop("run"), "summary": summary, "protocol": list(PROTOCOL), **content}


def markdown_table(rows: list[Row]) -> str:
    """A setting's table for a README."""
    cells = (
        [
            row.method,
            shown(row.block_efficiency),
            f"{row.tokens_per_second:.0f}",
            times(row.speedup),
            f"{row.nodes:.1f}" if row.nodes else "–",
        ]
        for row in rows
    )
    return markdown(COLUMNS, cells)


def write_report(data: ReportData, folder: Path) -> Path:
    """Write `results.json`, `results.md`, the PNGs and `index.html` into `folder`; returns the page's path."""
    shown_pictures = pictures(data)
    for name, figure in together(data).items():
        image = _png(figure)
        write_atomically(folder / f"{name}.png", lambda path, image=image: path.write_bytes(image))
    write_json(folder / "results.json", results(data))
    lines = [*(verdict.sentence for verdict in data.verdicts.values())]
    lines += [f"{setting}\n\n{markdown_table(rows)}" for setting, rows in data.tables.items()]
    write_atomically(folder / "results.md", lambda path: path.write_text("\n\n".join(lines) + "\n"))
    page = render(data, shown_pictures)
    write_atomically(folder / "index.html", lambda path: path.write_text(page, encoding="utf-8"))
    return folder / "index.html"


def render(data: ReportData, shown_pictures: list[Picture]) -> str:
    """The page."""
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawn: dict[str, list] = {}  # by section: (caption, [(title, SVG)])
    for picture in shown_pictures:
        elements = (Markup(svg(figure, f"{picture.name}-{i}")) for i, figure in enumerate(picture.panels.values()))
        drawn.setdefault(picture.section, []).append((picture.caption, list(zip(picture.panels, elements, strict=True))))
    return template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        data=data, sections=sections(data), pictures=drawn, protocol=PROTOCOL, glossary=GLOSSARY
    )


def _png(figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
