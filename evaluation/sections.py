"""The words and tables of the report's page, section by section: pure functions from its data to
text.

A part of the data that is empty gives no table, and a section without tables and pictures is not
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.decoding.stats import PHASES
from nde_talf.evaluation.loops import ASSISTED, SCHEDULES, is_outside
from nde_talf.evaluation.methods import NGRAM
from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED
from nde_talf.evaluation.table import LATENCIES, VLLM, Row
from nde_talf.evaluation.terminal import versus_rows
from nde_talf.evaluation.text import head_rows, in_words, pair_rows, stage_rows

if TYPE_CHECKING:
    from nde_talf.evaluation.report import ReportData


Cells = tuple[list[str], list[list[str]]]  # columns and rows of a table


@dataclass
class Table:
    """Cells of text below a title; the first column names the row.

    Attributes:
        title: empty for none.
        columns: their heads.
        rows: cells.
        tags: a word after a row's name, by that name.
        notes: paragraphs below.
        warning: a paragraph above, in red.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    tags: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warning: str = ""


def sections(data: ReportData) -> dict[str, list[Table]]:
    """The tables of the page's sections that have some, by id.

    Titles and order of the sections are in `report.html`.
    """
    found: dict[str, list[Table]] = {}
    for name, (part, what) in BY_SETTING.items():
        for setting in data.tables:
            columns, rows = part(data, setting)
            if rows:
                table = Table(
                    in_words(setting).capitalize() + what, columns, rows, tags(data, setting)
                )
                found.setdefault(name, []).append(table)
                own = data.verdicts.get(setting)
                if name in ("speed", "domains") and own and own.clock != "trusted":
                    table.warning = own.sentence
                if name == "speed":
                    table.notes = _notes_once(data, setting)
    more = {"selector": [*_versus(data), *_contexts(data)], "training": list(_training(data))}
    return found | {name: tables for name, tables in more.items() if tables}


def tags(data: ReportData, setting: str) -> dict[str, str]:
    """What kind of method each of a setting's is."""
    found = {row.method: "static" for row in data.tables[setting] if "(" in row.method}
    rules = [
        row.method
        for row in data.tables[setting]
        if any(mark in row.method for mark in ("τ", ", by ", NGRAM))
    ]
    found |= dict.fromkeys(rules, "rule")
    found |= dict.fromkeys(data.learned.get(setting, ()), "learned")
    found |= dict.fromkeys(data.exports.get(setting, {}).values(), "static export")
    found |= {row.method: "outside" for row in data.tables[setting] if is_outside(row.method)}
    return found | {BASELINE: "plain", CONTROL: "A/A"}


def cells(row: Row) -> dict[str, str]:
    """The cells of a method, by column."""
    nodes = f"{row.nodes:.1f}" if row.nodes else "–"
    return {
        "method": row.method,
        "speed-up": times(row.speedup),
        "in CPU time": times(row.cpu_speedup),
        "tokens/s": f"{row.tokens_per_second:.0f}",
        "block efficiency": shown(row.block_efficiency),
        "nodes a tree": nodes,
        "tree nodes": nodes,
    }


def _methods(data: ReportData, setting: str) -> Cells:
    on_cpu = ["in CPU time"] if any(row.cpu_speedup for row in data.tables[setting]) else []
    columns = ["method", "speed-up", *on_cpu, "tokens/s", "block efficiency", "nodes a tree"]
    return columns, [[cells(row)[column] for column in columns] for row in data.tables[setting]]


def _notes_once(data: ReportData, setting: str) -> list[str]:
    """The notes below a setting's table; one that all settings have is below the last table alone."""
    notes = [list(_notes(data, other)) for other in data.tables]
    return [
        n
        for n in _notes(data, setting)
        if setting == list(data.tables)[-1] or any(n not in other for other in notes)
    ]


def _notes(data: ReportData, setting: str) -> Iterator[str]:
    """What became of selectors that exported a static tree, and of methods that are the same as
    another; what was tuned.
    """
    same, exports = data.same.get(setting, {}), data.exports.get(setting, {})
    for title, export in exports.items():
        then = (
            f", the same method as {same[export]} above; it is not decoded twice"
            if export in same
            else ""
        )
        yield (
            f"{title} did not win here on training prompts held out in turn. Exported in its place:"
            f" {export}{then}."
        )
    for name, other in same.items():
        if name not in exports.values():
            yield f"{name}: the same method as {other}; it is not decoded twice."
    if any(row.method.startswith(f"{ASSISTED} (") for row in data.tables[setting]):
        yield TUNED


def _domains(data: ReportData, setting: str) -> Cells:
    kinds = data.kinds.get(setting, {})
    speeds = [{row.method: times(row.speedup) for row in rows} for rows in kinds.values()]
    methods = [row.method for row in data.tables[setting] if row.method != BASELINE]
    return ["speed-up", *kinds], [
        [method, *(own.get(method, "–") for own in speeds)] for method in methods if kinds
    ]


def _accepted(data: ReportData, setting: str) -> Cells:
    methods = {
        name: counts for name, counts in data.histograms.get(setting, {}).items() if len(counts) > 1
    }
    longest = max(map(len, methods.values()), default=0)
    rows = []
    for name, counts in methods.items():
        own = data.spec_decode.get(setting, {}).get(name)
        accepted = (
            _percent(own[f"{VLLM}_accepted_tokens"] / own[f"{VLLM}_draft_tokens"]) if own else "–"
        )
        rows.append(
            [
                name,
                accepted,
                *(_percent(n / sum(counts)) for n in counts),
                *[""] * (longest - len(counts)),
            ]
        )
    return ["method", "drafts accepted", *map(str, range(longest))], rows


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _latencies(data: ReportData, setting: str) -> Cells:
    columns = [
        "method",
        *(f"{name}, {p.upper()}" for name in ("TTFT", "TPOT", "total") for p in ("p50", "p95")),
    ]
    methods = {name: own for name, own in data.latencies.get(setting, {}).items() if own}
    ms = {
        m: [1e3 * own[name][p] for name in LATENCIES for p in ("p50", "p95")]
        for m, own in methods.items()
    }
    return columns, [
        [m, *(f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in own)] for m, own in ms.items()
    ]


def _phases(data: ReportData, setting: str) -> Cells:
    rows = [
        [row.method, *(_percent(row.shares[phase]) for phase in PHASES)]
        for row in data.tables[setting]
        if row.shares
    ]
    return ["fraction of step time", *PHASES], rows


def selector_intro(data: ReportData) -> list[str]:
    """Which selectors choose a tree at every step, and which exported a static one, with the
    settings.
    """
    exports: dict[tuple[str, ...], list[str]] = {}  # settings by the selectors' names
    chooses: dict[tuple[str, ...], list[str]] = {}
    for setting in data.tables:
        exports.setdefault(tuple(data.exports.get(setting, ())), []).append(in_words(setting))
        chooses.setdefault(
            tuple(m for m in data.learned.get(setting, ()) if "NDE" in m), []
        ).append(in_words(setting))
    lines = [
        f"At {_and(settings)} a static tree was exported in place of {_and(names)}: on training"
        " prompts held out in turn, choosing a tree at every step did not beat the best static"
        " tree by enough to pay for itself. There are no chosen trees to draw for it."
        for names, settings in exports.items()
        if names
    ]
    return lines + [
        f"At {_and(at)} these choose a tree at every step: {_and(names)}."
        for names, at in chooses.items()
        if names
    ]


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


BY_SETTING: dict[str, tuple[Callable[[ReportData, str], Cells], str]] = {
    "speed": (_methods, ""),
    "domains": (_domains, ""),
    "acceptance": (_accepted, ": steps by accepted tokens"),
    "latency": (_latencies, ", milliseconds"),
    "time": (_phases, ""),
}
"""Sections with a table for every sampling setting: what makes its cells, and what follows the
setting in its title.
"""


def _versus(data: ReportData) -> Iterator[Table]:
    doubtful = [
        in_words(setting) for setting, own in data.verdicts.items() if own.clock != "trusted"
    ]
    warning = f"{NOT_TRUSTED}: {', '.join(doubtful)}, and any mean with it." if doubtful else ""
    for method, others in data.versus.items():
        yield Table(f"{method}: tokens/s against", *versus_rows(others), warning=warning)


def _contexts(data: ReportData) -> Iterator[Table]:
    """Where contexts differ, by selector and setting, under the first latency table."""
    columns = [
        "held-out roots",
        "roots",
        "tokens a step",
        "own best tree",
        "with its own tree",
        "with the selector",
    ]
    for name, tables in data.offline.items():
        for setting, own in next(iter(tables.values()))["settings"].items():
            rows = [
                [
                    kind,
                    str(figures["roots"]),
                    f"{figures['tokens']:.2f}",
                    tree_title(figures["tree"]),
                    *(f"{figures[which]:.2f}×" for which in ("own_tree", "selector")),
                ]
                for kind, figures in own.get("by_domain", {}).items()
            ]
            if len(rows) > 1:
                title = (
                    f"{name}, {in_words(setting)}: best static tree over all"
                    f" {tree_title(own['static'])}"
                )
                yield Table(title, columns, rows, notes=[CONTEXTS])


def tree_title(action: Sequence[str | int] | None) -> str:
    """(4, 0, 3), or specinfer (4, 0, 3); a dash for none."""
    if action is None:
        return "–"
    *name, k, l1, l2 = action
    return " ".join([*map(str, name), f"({k}, {l1}, {l2})"])


def _training(data: ReportData) -> Iterator[Table]:
    if data.pair:
        yield Table("The pair, on held-out text", ["", ""], pair_rows(data.pair), notes=[OVERLAP])
    if data.head:
        columns, by_token, others = head_rows(data.head)
        title = "The draft head, on held-out text"
        if by_token:
            yield Table(title, columns, by_token, notes=[HEAD])
        if others:
            yield Table("" if by_token else title, ["", ""], others)
    if data.stages:
        yield Table("Time by stage", ["", ""], stage_rows(data.stages))


TUNED = (
    f"{ASSISTED}: tuned for this pair. Its default schedule and {len(SCHEDULES) - 1} others"
    " (constant and heuristic, with and without a threshold of confidence, 2 to 12 tokens) were"
    " timed on calibration prompts, as the head's trees are, and the fastest was taken."
)
CONTEXTS = (
    "Offline, by the labels and the latency table. Tokens a step are those of the one tree that is"
    " best over all texts. The last two columns are tokens/s over that tree's: with the kind's own"
    " best tree, and with the selector. Trees were chosen on training prompts. A dash: too few"
    " training roots."
)
OVERLAP = (
    "Overlap is the sum of the smaller of both probabilities of every token: how often one"
    " speculative draw is accepted."
)
HEAD = (
    "The 1st drafted token is predicted after held-out text; later ones, for agreement and KL,"
    " after the target's own most likely tokens (a beam), so that columns differ in the tokens"
    " before them and not only in how far the head drafts ahead. Overlap is measured after the"
    " head's own draws, at temperature 1."
)
