"""The report: one self-contained HTML page, its pictures as PNGs, and all numbers as JSON.

The words are in `report.html`; the numbers are in `report_data`.
"""

from base64 import b64encode
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.decoding.common.files import write_atomically, write_json
from nde_talf.evaluation.plots import pictures, unbroken
from nde_talf.evaluation.protocol import PROTOCOL
from nde_talf.evaluation.report_data import ReportData
from nde_talf.evaluation.table import markdown
from nde_talf.evaluation.verdict import in_words

TEMPLATE = Path(__file__).with_name("report.html")


def results(data: ReportData) -> dict[str, Any]:
    """Return all numbers, for results.json and the terminal."""
    content = {name: value for name, value in asdict(data).items() if name != "curves"}
    summary = [
        " ".join([verdict.sentence, *data.standing[setting]])
        for setting, verdict in data.verdicts.items()
    ]
    return {"summary": summary, "protocol": list(PROTOCOL), **content}


def table_of_methods(data: ReportData, setting: str) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a setting's table."""
    rows = data.tables[setting]
    columns = ["method", "speed-up", "in CPU time", "tokens/s", "block efficiency", "nodes a tree"]
    cells = [
        [
            row.method,
            times(row.speedup),
            times(row.cpu_speedup),
            f"{row.tokens_per_second:.0f}",
            shown(row.block_efficiency),
            f"{row.nodes:.1f}" if row.nodes else "–",
        ]
        for row in rows
    ]
    return columns, cells


def in_markdown(data: ReportData) -> str:
    """Return tables and verdicts in Markdown, for the terminal and a README."""
    parts = []
    for setting, conclusion in data.verdicts.items():
        same = data.titles[setting].same
        parts += [f"**{setting}**", markdown(*table_of_methods(data, setting))]
        parts += [f"{name}: the same as {other}" for name, other in same.items()]
        parts += [conclusion.sentence, *data.standing[setting]]
    return "\n\n".join(parts) + "\n"


def write_report(data: ReportData, folder: Path) -> None:
    """Write `results.json`, `results.md`, the PNGs and `index.html`."""
    drawn: dict[str, dict[str, str]] = {}  # by section and name
    for section, name, figure in pictures(data):
        picture = folder / f"{name}.png"
        write_atomically(picture, partial(figure.savefig, format="png", dpi=200))
        drawn.setdefault(section, {})[name] = b64encode(picture.read_bytes()).decode()
    write_json(folder / "results.json", results(data))
    write_atomically(
        folder / "results.md", lambda path: path.write_text(in_markdown(data), "utf-8")
    )
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(
        data=data,
        tables={setting: table_of_methods(data, setting) for setting in data.tables},
        pictures=drawn,
        protocol=PROTOCOL,
        in_words=in_words,
        times=times,
        unbroken=unbroken,
    )
    write_atomically(folder / "index.html", lambda path: path.write_text(page, encoding="utf-8"))
