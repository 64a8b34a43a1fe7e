"""Which pictures a report has, in which section, and with which captions.

A part of the data that is empty has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from nde_talf.evaluation import plots
from nde_talf.evaluation.loops import TITLES

if TYPE_CHECKING:
    from nde_talf.evaluation.report import ReportData


@dataclass
class Picture:
    """One picture of the report.

    Attributes:
        name: of its PNG.
        section: an id of `nde_talf.evaluation.sections`.
        draw: makes a figure of one part or several, of a width.
        full: all parts, as the PNG shows them.
        parts: on the page, by title; each is drawn by itself, as wide as a telephone.
    """

    name: str
    section: str
    draw: Callable[..., Figure]
    full: dict
    parts: dict[str, dict]

    def panels(self) -> dict[str, Figure]:
        """A figure for every part."""
        return {
            title: self.draw(part, width=plots.PANEL) if title else self.draw(part)
            for title, part in self.parts.items()
        }


def pictures(data: ReportData) -> list[Picture]:
    """Every picture, in order."""
    return [picture for picture in _pictures(data) if picture.parts]


def _pictures(data: ReportData) -> Iterator[Picture]:
    def each(name: str, section: str, draw: Callable[..., Figure], full: dict) -> Picture:
        return Picture(
            name, section, draw, full, {title: {title: part} for title, part in full.items()}
        )

    learned = {setting: set(names) for setting, names in data.learned.items()}
    phases = {
        setting: own
        for setting, rows in data.tables.items()
        if (own := [row for row in rows if row.shares])
    }
    yield each("speedup", "speed", partial(plots.speed_bars, learned=learned), data.tables)
    yield each("positions", "acceptance", plots.position_lines, data.positions)
    yield each("phases", "time", plots.phase_fractions, phases)
    chosen = {
        f"{name}, {s}": {s: {name: own[name]}} for s, own in data.chosen.items() for name in own
    }
    draw = partial(plots.action_histogram, static=data.static)
    yield Picture("actions", "selector", draw, data.chosen, chosen)
    ratios = {
        f"{TITLES[name]} + selector, latency table “{table}”": {name: {table: own}}
        for name, tables in data.offline.items()
        for table, own in tables.items()
    }
    yield Picture("selector", "selector", plots.selector_ratios, data.offline, ratios)
    choosing = plots.chooses(data.offline)
    entropy = {
        f"{TITLES[name]} + selector, {setting}": {
            name: {
                table: {**own, "settings": {setting: own["settings"][setting]}}
                for table, own in tables.items()
            }
        }
        for name, tables in choosing.items()
        for setting in next(iter(tables.values()))["settings"]
    }
    yield Picture("entropy", "selector", plots.choice_by_entropy, choosing, entropy)
    yield each("acceptance", "solvers", plots.acceptance_curves, data.acceptance)
    losses = {name: series for name, series in data.curves.items() if plots.losses_of(series)}
    yield each("curves", "training", plots.loss_curves, losses)
