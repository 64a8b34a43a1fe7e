"""The words and tables of the report's page, section by section: pure functions from its data to text.

A part of the data that is empty gives no table, and a section without tables and pictures is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from decoding.common.bootstrap import shown, times
from decoding.loop import PHASES
from evaluation.assisted import ASSISTED, SCHEDULES, is_assisted
from evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED
from evaluation.table import LATENCIES, VLLM, Row
from evaluation.terminal import untrusted, versus_rows
from evaluation.text import head_rows, in_words, pair_rows, stage_rows

if TYPE_CHECKING:
    from evaluation.report import ReportData


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


@dataclass
class Section:
    """id: what links and pictures name it by. intro: paragraphs above its pictures and tables."""

    id: str
    title: str
    intro: list[str]
    tables: list[Table] = field(default_factory=list)


def sections(data: ReportData) -> list[Section]:
    """All sections in order, those without tables too."""
    return [
        Section("speed", "Speed", [], list(_methods(data))),
        Section("domains", "Speed by domain", [], list(_domains(data))),
        Section("acceptance", "Accepted drafts", [], list(_accepted(data))),
        Section("latency", "Latency", [], list(_latencies(data))),
        Section("time", "Where the time goes", [], list(_phases(data))),
        Section("predicted", "Predicted and measured", [], list(_predicted(data))),
        Section("sample", "A decoded text", []),
        Section("selector", "The selectors", _selector_intro(data), list(_versus(data))),
        Section("solvers", "Verification rules on this pair", []),
        Section("training", "The pair and its training", [], list(_training(data))),
    ]


def _clock(data: ReportData, setting: str) -> str:
    own = data.verdicts.get(setting)
    return own.sentence if own and own.clock != "trusted" else ""


def tags(data: ReportData, setting: str) -> dict[str, str]:
    """What kind of method each of a setting's is."""
    found = {row.method: "static" for row in data.tables[setting] if "(" in row.method}
    found |= {row.method: "rule" for row in data.tables[setting] if "τ" in row.method or ", by " in row.method}
    found |= dict.fromkeys(data.learned.get(setting, ()), "learned")
    found |= dict.fromkeys(data.exports.get(setting, {}).values(), "static export")
    found |= {row.method: "outside" for row in data.tables[setting] if is_assisted(row.method)}
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


def _of_setting(data: ReportData, setting: str, columns: list[str], rows: list[list[str]], what: str = "") -> Iterator[Table]:
    """The table of a setting, if it has rows."""
    if rows:
        yield Table(in_words(setting).capitalize() + what, columns, rows, tags(data, setting))


def _methods(data: ReportData) -> Iterator[Table]:
    said = _notes_once({setting: list(_notes(data, setting)) for setting in data.tables})
    for setting, rows in data.tables.items():
        on_cpu = ["in CPU time"] if any(row.cpu_speedup for row in rows) else []
        columns = ["method", "speed-up", *on_cpu, "tokens/s", "block efficiency", "nodes a tree"]
        for table in _of_setting(data, setting, columns, [[cells(row)[column] for column in columns] for row in rows]):
            yield replace(table, notes=said[setting], warning=_clock(data, setting))


def _notes_once(notes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Notes by setting; one that all settings have is below the last table alone."""
    last = list(notes)[-1] if notes else ""
    return {s: [note for note in own if s == last or any(note not in x for x in notes.values())] for s, own in notes.items()}


def _notes(data: ReportData, setting: str) -> Iterator[str]:
    """What became of selectors that exported a static tree, and of methods that are the same as another; what was tuned."""
    same, exports = data.same.get(setting, {}), data.exports.get(setting, {})
    for title, export in exports.items():
        then = f", the same method as {same[export]} above; it is not decoded twice" if export in same else ""
        yield f"{title} did not win here on training prompts held out in turn. Exported in its place: {export}{then}."
    for name, other in same.items():
        if name not in exports.values():
            yield f"{name}: the same method as {other}; it is not decoded twice."
    if any(row.method.startswith(f"{ASSISTED} (") for row in data.tables[setting]):
        yield TUNED


def _domains(data: ReportData) -> Iterator[Table]:
    for setting, kinds in data.kinds.items():
        speeds = {kind: {row.method: times(row.speedup) for row in rows} for kind, rows in kinds.items()}
        methods = [row.method for row in data.tables[setting] if row.method != BASELINE]
        rows = [[method, *(own.get(method, "–") for own in speeds.values())] for method in methods]
        for table in _of_setting(data, setting, ["speed-up", *speeds], rows):
            yield replace(table, warning=_clock(data, setting))


def _accepted(data: ReportData) -> Iterator[Table]:
    for setting, methods in data.histograms.items():
        methods = {name: counts for name, counts in methods.items() if len(counts) > 1}
        longest = max(map(len, methods.values()), default=0)
        rows = []
        for name, counts in methods.items():
            own = data.spec_decode.get(setting, {}).get(name)
            accepted = _percent(own[f"{VLLM}_accepted_tokens"] / own[f"{VLLM}_draft_tokens"]) if own else "–"
            rows.append([name, accepted, *(_percent(n / sum(counts)) for n in counts), *[""] * (longest - len(counts))])
        columns = ["method", "drafts accepted", *map(str, range(longest))]
        yield from _of_setting(data, setting, columns, rows, ": steps by accepted tokens")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _latencies(data: ReportData) -> Iterator[Table]:
    columns = ["method", *(f"{name}, {p.upper()}" for name in ("TTFT", "TPOT", "total") for p in ("p50", "p95"))]
    for setting, methods in data.latencies.items():
        rows = [[m, *(_ms(own[name][p]) for name in LATENCIES for p in ("p50", "p95"))] for m, own in methods.items() if own]
        yield from _of_setting(data, setting, columns, rows, ", milliseconds")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _phases(data: ReportData) -> Iterator[Table]:
    for setting, table in data.tables.items():
        rows = [[row.method, *(_percent(row.shares[phase]) for phase in PHASES)] for row in table if row.shares]
        yield from _of_setting(data, setting, ["fraction of step time", *PHASES], rows)


def _predicted(data: ReportData) -> Iterator[Table]:
    columns = ["method", "tokens a step", "predicted", "ms a step", "of CPU time", "predicted", "predicted / CPU time"]
    for setting, predicted in data.predicted.items():
        rows = []
        for row in data.tables[setting]:
            if row.method in predicted:
                (tokens, seconds), measured = predicted[row.method], row.block_efficiency[0]
                rates = row.tokens_per_second, row.tokens_per_cpu_second or row.tokens_per_second
                figures = (measured, tokens, *(1e3 * measured / rate for rate in rates), 1e3 * seconds)
                rows.append([row.method, *(f"{x:.2f}" for x in figures), f"{seconds * rates[1] / measured:.3f}"])
        for table in _of_setting(data, setting, columns, rows):
            yield replace(table, notes=[PREDICTED])


def _selector_intro(data: ReportData) -> list[str]:
    # Settings by the selectors' names, so that one sentence covers several settings.
    exports: dict[tuple[str, ...], list[str]] = {}
    chooses: dict[tuple[str, ...], list[str]] = {}
    for setting in data.tables:
        if names := tuple(data.exports.get(setting, ())):
            exports.setdefault(names, []).append(in_words(setting))
        if names := tuple(m for m in data.learned.get(setting, ()) if "NDE" in m):
            chooses.setdefault(names, []).append(in_words(setting))
    lines = [
        f"At {_and(settings)} a static tree was exported in place of {_and(names)}: on training prompts held out in turn, "
        "choosing a tree at every step did not beat the best static tree by enough to pay for itself. There are no chosen "
        "trees to draw for it."
        for names, settings in exports.items()
    ]
    return lines + [f"At {_and(at)} these choose a tree at every step: {_and(names)}." for names, at in chooses.items()]


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _versus(data: ReportData) -> Iterator[Table]:
    doubtful = untrusted({setting: {"clock": own.clock} for setting, own in data.verdicts.items()})
    warning = f"{NOT_TRUSTED}: {', '.join(map(in_words, doubtful))}, and any mean with it." if doubtful else ""
    for method, others in data.versus.items():
        columns, rows = versus_rows(others)
        yield Table(f"{method}: tokens/s against", ["method", *columns[1:]], rows, warning=warning)


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
    f"{ASSISTED}: tuned for this pair. Its default schedule and {', '.join(map(str, SCHEDULES[1:-1]))} or {SCHEDULES[-1]} "
    "tokens drafted a step (without a threshold of confidence) were timed on calibration prompts, as the head's trees "
    "are, and the fastest was taken."
)
PREDICTED = (
    "Predicted: tokens by the labels of the traced roots, seconds by the latency table. What a selector takes to choose is not "
    "priced. Where CPU time was not taken, wall time is in its place. On a quiet machine the ratio is within 5 % of 1."
)
OVERLAP = "Overlap is the sum of the smaller of both probabilities of every token: how often one speculative draw is accepted."
HEAD = (
    "The 1st drafted token is predicted after held-out text; later ones, for agreement and KL, after the target's own most "
    "likely tokens (a beam), so that columns differ in the tokens before them and not only in how far the head drafts ahead. "
    "Overlap is measured after the head's own draws, at temperature 1."
)
