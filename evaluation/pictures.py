"""Which pictures a report has, in which section, and with which captions. A part of the data that is empty has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from evaluation import plots
from evaluation.methods import TITLES

if TYPE_CHECKING:
    from evaluation.report import ReportData


@dataclass
class Picture:
    """One picture of the report.

    Attributes:
        name: of its PNG.
        section: an id of `evaluation.sections`.
        caption: the text under it.
        draw: makes a figure of one part or several, of a width.
        full: all parts, as the PNG shows them.
        parts: on the page, by title; each is drawn by itself, as wide as a telephone.
    """

    name: str
    section: str
    caption: str
    draw: Callable[..., Figure]
    full: dict
    parts: dict[str, dict]

    def panels(self) -> dict[str, Figure]:
        """A figure for every part."""
        return {title: self.draw(part, width=plots.PANEL) if title else self.draw(part) for title, part in self.parts.items()}


def pictures(data: ReportData) -> list[Picture]:
    """Every picture, in order."""
    return [picture for picture in _pictures(data) if picture.parts]


def _pictures(data: ReportData) -> Iterator[Picture]:
    def each(name: str, section: str, caption: str, draw: Callable[..., Figure], full: dict) -> Picture:
        return Picture(name, section, caption, draw, full, {title: {title: part} for title, part in full.items()})

    learned = {setting: set(names) for setting, names in data.learned.items()}
    phases = {setting: own for setting, rows in data.tables.items() if (own := [row for row in rows if row.shares])}
    yield each("speedup", "speed", SPEED, partial(plots.speed_bars, learned=learned), data.tables)
    yield each("positions", "acceptance", POSITIONS, plots.position_lines, data.positions)
    yield each("phases", "time", PHASES, plots.phase_fractions, phases)
    chosen = {f"{name}, {s}": {s: {name: own[name]}} for s, own in data.chosen.items() for name in own}
    draw = partial(plots.action_histogram, static=data.static)
    yield Picture("actions", "selector", ACTIONS, draw, data.chosen, chosen)
    ratios = {
        f"{TITLES[name]} + selector, latency table “{table}”": {name: {table: own}}
        for name, tables in data.offline.items()
        for table, own in tables.items()
    }
    yield Picture("selector", "selector", SELECTOR, plots.selector_ratios, data.offline, ratios)
    choosing = plots.chooses(data.offline)
    entropy = {
        f"{TITLES[name]} + selector, {setting}": {
            name: {table: {**own, "settings": {setting: own["settings"][setting]}} for table, own in tables.items()}
        }
        for name, tables in choosing.items()
        for setting in next(iter(tables.values()))["settings"]
    }
    yield Picture("entropy", "selector", ENTROPY, plots.choice_by_entropy, choosing, entropy)
    ablations = {"": data.ablations} if data.ablations else {}
    yield Picture("learning", "selector", LEARNING, plots.learning_curves, data.ablations, ablations)
    yield Picture("tail", "selector", TAIL, plots.tails, data.ablations, ablations)
    yield each("acceptance", "solvers", SOLVERS, plots.acceptance_curves, data.acceptance)
    losses = {name: series for name, series in data.curves.items() if plots.losses_of(series)}
    yield each("curves", "training", f"{CURVES} {HEAD}" if "head" in data.curves else CURVES, plots.loss_curves, losses)


SPEED = (
    "Tokens per second over plain autoregressive decoding; whiskers are 95 % intervals. Blue: something learned in this run "
    "chooses or drafts. Grey: static trees and outside code. Pale: plain decoding and its A/A control, whose interval is the "
    "orange band: differences inside it are the clock's."
)
POSITIONS = (
    "How many of all steps accept a drafted token at each position of the path. Acceptance at a position needs acceptance at "
    "all before it, so lines fall; a line ends where a method never accepted more. Blue: "
    "something learned here; grey: outside code; other colours: verification rules, the same in all plots."
)
PHASES = (
    "Where the time of a step goes: drafting, the target's pass, verification with the clean-up of its cache, and the "
    "selector's own choosing."
)
ACTIONS = "Trees that a selector chose while decoding. Orange: the best static tree of the same selector and setting."
SELECTOR = (
    "The selectors offline, on prompts that they were not trained on. Grey: choosing root by root, between choosing on one "
    "half of the super-trees and scoring on the other (labels are noisy: an underestimate) and choosing and scoring on the "
    "same (an overestimate). Where a static tree was exported, the selector's point is that tree's, 1."
)
ENTROPY = (
    "Depth and size of the trees that a selector chooses, by how unsure the draft is of the next token. Only settings under "
    "which the network chooses."
)
LEARNING = "The selector with less training data."
TAIL = "Worst roots: the selector's tokens/s against the best static tree, with and without the tail term of its objective."
SOLVERS = (
    "How often one of four draws is accepted, by verification rule and depth, and the maximum that any rule could reach "
    "(dashed). Along paths drawn from the draft, from the target's own texts."
)
CURVES = "Training losses by step, each of one batch."
HEAD = (
    "The head's losses are a node, and those after the 1st drafted token begin with its trees (draft.chain_fraction). With "
    "TALF's loss, a cross-entropy with the target's probabilities, a line cannot fall below the target's own entropy on the "
    "batch's text and rises with it; how far the head is from the target is the KL in the table below."
)
