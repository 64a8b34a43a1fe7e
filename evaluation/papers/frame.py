"""What a table, a figure and a claim of a paper are here, and how they are written: Markdown, JSON
and PNG.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import inf

from matplotlib.figure import Figure

from nde_talf.evaluation.papers.resampled import Samples, as_interval, as_text
from nde_talf.evaluation.plots import SERIES, legend, new_figure, styled, whiskers
from nde_talf.evaluation.text import markdown

Row = tuple[str, ...]
Cell = Callable[[Row, str], Samples | None]
HOLDS, FAILS, UNSEEN = "holds", "does not hold", "cannot be seen here"
BELOW, ABOVE, OPEN = (
    "Below 1 with its full interval",
    "Above 1 with its full interval",
    "The interval holds 1",
)
EQUAL, FEW_PROMPTS = "Equal, for both take the same trees", "Too few prompts for an interval"
ABSENT = "Not measured"


@dataclass(frozen=True)
class Plot:
    """The axes of a figure: kind is "lines" (a line a row, columns along x) or "bars" (a group a
    row, a bar a column).
    """

    kind: str
    x: str
    y: str


@dataclass(frozen=True)
class Table:
    """One table or figure of a paper, as far as it depends on what is measured.

    Attributes:
        name: as the paper numbers it: "Table 2", "Figure 5a".
        caption: a sentence.
        keys: titles of the columns that name a row.
        rows: one tuple of keys a row.
        columns: titles of the measured columns.
        cell: our figure for a row and a column; None if it was not measured.
        digits: behind the point.
        plot: for a figure.
        notes: sentences below the table.
        works: names of the measurements that it needs.
    """

    name: str
    caption: str
    keys: Row
    rows: Sequence[Row]
    columns: Sequence[str]
    cell: Cell
    digits: int = 2
    plot: Plot | None = None
    notes: Sequence[str] = ()
    works: Sequence[str] = ()


Printed = dict[str, tuple[list[str], list[list[str]]]]


def printed(paper: str) -> Printed:
    """What a paper prints, by table: titles of the columns, and rows of cells as text."""
    found: Printed = {}
    text = files("nde_talf.evaluation.papers").joinpath("printed", f"{paper}.md").read_text()
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        cells = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])
        ]
        found[part.splitlines()[0]] = cells[0], cells[1:]
    return found


def measured(table: Table, prompts: dict[str, str] | None = None) -> dict:
    """A table's own figures as JSON: each cell [value, low, high], or null where it was not
    measured. prompts: in words, those of the measurements that it needs.
    """
    cells = [
        [as_interval(table.cell(row, column)) for column in table.columns] for row in table.rows
    ]
    return {
        "caption": table.caption,
        "keys": list(table.keys),
        "rows": [list(row) for row in table.rows],
        "columns": list(table.columns),
        "cells": cells,
        "digits": table.digits,
        "notes": list(table.notes),
        "prompts": {name: prompts[name] for name in table.works if name in (prompts or {})},
    }


def as_markdown(name: str, found: dict, paper: Printed) -> str:
    """A table with ours first.

    A printed cell of the same row and column stands after a slash in ours; the paper's other
    columns follow, and its other rows stand below.
    """
    columns, rows = paper.get(name, ([], []))
    keys, width = found["keys"], len(found["keys"])
    values = {
        tuple(row[:width]): dict(zip(columns[width:], row[width:], strict=True)) for row in rows
    }
    others = [column for column in columns[width:] if column not in found["columns"]]
    lines = []
    for key, cells in zip(found["rows"], found["cells"], strict=True):
        own = values.pop(tuple(key), {})
        line = [as_text(cell, found["digits"]) for cell in cells]
        line = [
            f"{ours} / {own[c]}" if own.get(c) else ours
            for ours, c in zip(line, found["columns"], strict=True)
        ]
        lines.append([*key, *line, *(own.get(column, "") for column in others)])
    lines += [[*key, *(f"/ {own[c]}" if c in own else "" for c in found["columns"]), *(own[c] for c in others)]
              for key, own in values.items()]  # fmt: skip
    titles = [*keys, *found["columns"], *(f"paper: {column}" for column in others)]
    counts = found.get("prompts", {})
    each = (
        [f"{text} for {name}" for name, text in counts.items()]
        if len(set(counts.values())) > 1
        else [*counts.values()][:1]
    )
    caption = f"{found['caption']}." + (f" Measured on {'; '.join(each)}." if each else "")
    parts = [f"## {name}", caption, markdown(titles, lines), *found["notes"]]
    return "\n\n".join(parts) + "\n"


@styled
def picture(plot: Plot, found: dict) -> Figure:
    """The figure of a table, with its paper's axes."""
    figure, (axis,) = new_figure(1, 1, 3.4, 5.6)
    for number, (row, cells) in enumerate(zip(found["rows"], found["cells"], strict=True)):
        label, style = ", ".join(row), {"color": SERIES[number % len(SERIES)], "lw": 1.2}
        there = [(i, cell) for i, cell in enumerate(cells) if cell]
        values = [cell if len(cell) == 3 else cell * 3 for _, cell in there]
        if not there:
            continue
        if plot.kind == "lines":
            style["ls"] = ("-", "--", ":")[number // len(SERIES) % 3]
            at = [i for i, _ in there]
            axis.errorbar(
                at,
                [v[0] for v in values],
                yerr=whiskers(values),
                marker="o",
                ms=3,
                label=label,
                **style,
            )
        else:
            width = 0.8 / len(found["rows"])
            at = [i + width * (number - (len(found["rows"]) - 1) / 2) for i, _ in there]
            colour = SERIES[number % len(SERIES)]
            axis.bar(
                at,
                [v[0] for v in values],
                width,
                yerr=whiskers(values),
                label=label,
                color=colour,
                error_kw={"lw": 1},
            )
    axis.set_xticks(range(len(found["columns"])), found["columns"])
    axis.tick_params(axis="x", labelrotation=0 if max(map(len, found["columns"])) < 8 else 20)
    axis.set(xlabel=plot.x, ylabel=plot.y)
    return legend(figure, [axis])


@dataclass(frozen=True)
class Claim:
    """What a paper claims, as ratios that are above 1 if it holds.

    Attributes:
        text: the claim.
        says: the paper's own figure.
        figures: ratios by what they compare; None for one that was not measured.
        note: what else a reader of the verdict has to know.
        doubts: why times do not count; then the claim cannot be seen.
    """

    text: str
    says: str
    figures: Callable[[], dict[str, Samples | None]]
    note: str = ""
    doubts: Sequence[str] = ()

    def verdict(self) -> dict:
        """As JSON, with the verdict and its reason.

        A claim holds if every interval is above 1, does not if one is below 1, and cannot be seen
        otherwise. The lowest figures come first.
        """
        found = {name: as_interval(figure) for name, figure in self.figures().items()}
        found = dict(sorted(found.items(), key=lambda item: item[1] or [inf]))
        groups: dict[str, list[str]] = {}
        for name, own in found.items():
            groups.setdefault(_standing(own), []).append(name)
        verdict = FAILS if BELOW in groups else HOLDS if set(groups) == {ABOVE} else UNSEEN
        verdict = UNSEEN if self.doubts else verdict
        words = [
            f"{text}: {', '.join(groups[text])}."
            for text in (BELOW, EQUAL, OPEN, FEW_PROMPTS, ABSENT)
            if text in groups
        ]
        if ABOVE in groups:
            words.append(f"{ABOVE}: {', '.join(groups[ABOVE]) if words else 'every one'}.")
        words = [*self.doubts, *words, *([self.note] if self.note else [])]
        return {
            "claim": self.text,
            "paper says": self.says,
            "figures": found,
            "verdict": verdict,
            "reason": " ".join(words),
        }


def _standing(own: list[float] | None) -> str:
    """What one ratio says of its claim."""
    if not own:
        return ABSENT
    if len(own) < 3:
        return FEW_PROMPTS
    if own[1] == own[2] == 1:
        return EQUAL
    return BELOW if own[2] < 1 else ABOVE if own[1] > 1 else OPEN


def verdict_table(verdicts: Sequence[dict]) -> str:
    """Markdown, the claims that do not hold first."""
    order = [FAILS, UNSEEN, HOLDS]
    rows = []
    for own in sorted(verdicts, key=lambda verdict: order.index(verdict["verdict"])):
        figures = "; ".join(
            f"{name}: {as_text(figure, 3) or '–'}" for name, figure in own["figures"].items()
        )
        rows.append(
            [
                own["paper"],
                own["claim"],
                own["paper says"],
                figures,
                f"**{own['verdict']}**",
                own["reason"],
            ]
        )
    return (
        markdown(
            ["paper", "claim", "paper says", "here (above 1: as claimed)", "verdict", "reason"],
            rows,
        )
        + "\n"
    )
