"""Which pictures a report has, in which section, and what is said under them. A part of the data that is empty has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from evaluation.ablation_table import learning_curves, tails
from evaluation.identity import TITLES
from evaluation.plots import (
    PANEL,
    WIDTH,
    acceptance_curves,
    action_histogram,
    choice_by_entropy,
    chooses,
    loss_curves,
    losses_of,
    phase_shares,
    position_lines,
    selector_ratios,
    speed_bars,
)

if TYPE_CHECKING:
    from evaluation.report import ReportData


@dataclass
class Picture:
    """Panels by title, each as wide as a telephone. section: an id of `evaluation.sections`."""

    name: str
    section: str
    caption: str
    panels: dict[str, Figure]


def pictures(data: ReportData) -> list[Picture]:
    """Every picture of the page, in order."""
    choosing, found = chooses(data.offline), []

    def add(name: str, section: str, caption: str, panels: dict[str, Figure]) -> None:
        if panels:
            found.append(Picture(name, section, caption, panels))

    def each(parts: dict, draw: Callable[..., Figure], *more) -> dict[str, Figure]:
        return {title: draw({title: own}, *more, width=PANEL) for title, own in parts.items()}

    learned = {setting: set(names) for setting, names in data.learned.items()}
    add("speedup", "speed", SPEED, each(data.tables, speed_bars, learned))
    add("positions", "acceptance", POSITIONS, each(data.positions, position_lines))
    add("phases", "time", PHASES, each(_with_phases(data.tables), phase_shares))
    chosen = {
        f"{method}, {setting}": action_histogram({setting: {method: counts}}, data.static, width=PANEL)
        for setting, own in data.chosen.items()
        for method, counts in own.items()
    }
    add("actions", "selector", ACTIONS, chosen)
    ratios = {
        f"{TITLES[name]} + selector, latency table “{table}”": selector_ratios({name: {table: own}}, width=PANEL)
        for name, tables in data.offline.items()
        for table, own in tables.items()
    }
    add("selector", "selector", SELECTOR, ratios)
    entropy = {
        f"{TITLES[name]} + selector, {setting}": choice_by_entropy(
            {name: {table: {**own, "settings": {setting: own["settings"][setting]}} for table, own in tables.items()}},
            width=PANEL,
        )
        for name, tables in choosing.items()
        for setting in next(iter(tables.values()))["settings"]
    }
    add("entropy", "selector", ENTROPY, entropy)
    if data.ablations:
        add("learning", "selector", LEARNING, {"": learning_curves(data.ablations)})
        add("tail", "selector", TAIL, {"": tails(data.ablations)})
    add("acceptance", "solvers", SOLVERS, each(data.acceptance, acceptance_curves))
    caption = f"{CURVES} {HEAD}" if "head" in data.curves else CURVES
    add("curves", "training", caption, each({n: s for n, s in data.curves.items() if losses_of(s)}, loss_curves))
    return found


def together(data: ReportData) -> dict[str, Figure]:
    """The same as one wide figure each, by file name, for other documents."""
    learned, choosing = {setting: set(names) for setting, names in data.learned.items()}, chooses(data.offline)
    found = {"speedup": speed_bars(data.tables, learned)}
    if timed := _with_phases(data.tables):
        found["phases"] = phase_shares(timed)
    if data.positions:
        found["positions"] = position_lines(data.positions)
    if data.chosen:
        found["actions"] = action_histogram(data.chosen, data.static, width=WIDTH)
    if data.offline:
        found["selector"] = selector_ratios(data.offline)
    if choosing:
        found["entropy"] = choice_by_entropy(choosing)
    if data.ablations:
        found |= {"learning": learning_curves(data.ablations), "tail": tails(data.ablations)}
    if data.acceptance:
        found["acceptance"] = acceptance_curves(data.acceptance)
    if any(losses_of(series) for series in data.curves.values()):
        found["curves"] = loss_curves(data.curves)
    return found


def _with_phases(tables: dict) -> dict:
    return {setting: own for setting, rows in tables.items() if (own := [row for row in rows if row.shares])}


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
    "How often one of four draws is accepted, by verification rule and depth, beside the most that any rule could reach "
    "(dashed). Along paths drawn from the draft, from the target's own texts."
)
CURVES = "Training losses by step, each of one batch."
HEAD = (
    "The head's losses are a node, and those after the 1st drafted token begin with its trees (draft.chain_fraction). With "
    "TALF's loss, a cross-entropy with the target's probabilities, a line cannot fall below the target's own entropy on the "
    "batch's text and rises with it; how far the head is from the target is the KL in the table below."
)
