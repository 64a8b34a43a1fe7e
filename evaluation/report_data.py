"""The numbers of the report, from records and the curves of trainings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.plan import Titles
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import (
    Row,
    acceptance_by_position,
    by_setting,
    histogram,
    steps_by_tree,
    tabulate,
)
from nde_talf.evaluation.verdict import Verdict, verdict


@dataclass
class Learned:
    """Speed-ups of a learned part, paired by prompt, each [value, low, high].

    Attributes:
        method: its title.
        plain: over plain decoding.
        static: title of its rule's best static tree; "" where that was not decoded beside it.
        over_static: over that tree.
        outside: title of the fastest method of transformers.
        over_outside: over that method.
    """

    method: str
    plain: list[float]
    static: str = ""
    over_static: list[float] | None = None
    outside: str = ""
    over_outside: list[float] | None = None


@dataclass
class ReportData:
    """The numbers of the report; an empty part is left out.

    Attributes:
        run: name of the run.
        tables: rows by setting.
        verdicts: by setting.
        histograms: by setting and method, steps by accepted tokens.
        chosen: by setting and selector, steps by tree.
        measured: amount of decoded text, in words.
        titles: of the methods, by setting.
        parts: by setting, the speed-ups of every learned method.
        curves: by training, its series.
        environment: circumstances of the measurement.
    """

    run: str
    tables: dict[str, list[Row]]
    verdicts: dict[str, Verdict]
    histograms: dict[str, dict[str, list[int]]]
    chosen: dict[str, dict[str, dict[str, int]]]
    measured: str
    titles: dict[str, Titles]
    curves: dict[str, dict[str, list[tuple[int, float]]]]
    environment: dict[str, str]
    parts: dict[str, list[Learned]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: str, records: list[Record], conditions: str, **parts: Any) -> "ReportData":
        """Compute the fields that follow from records. conditions: see `verdict`; parts: others."""
        tables = tabulate(records)
        made = cls(
            run,
            tables,
            {s: verdict(s, rows, conditions, records) for s, rows in tables.items()},
            _by_method(records, histogram),
            _by_method(records, steps_by_tree),
            **parts,
        )
        for setting, methods in by_setting(records).items():
            titles = made.titles.get(setting, Titles())
            of_setting = tables[setting], methods, titles.statics
            made.parts[setting] = [_learned(title, *of_setting) for title in titles.learned]
        return made

    @property
    def positions(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """Positions in the draft and their acceptance, by setting and method that drafts."""
        return {
            setting: rates
            for setting, methods in self.histograms.items()
            if (
                rates := {
                    name: [*enumerate(acceptance_by_position(steps), 1)]
                    for name, steps in methods.items()
                    if len(steps) > 1
                }
            )
        }

    @property
    def standing(self) -> dict[str, list[str]]:
        """Sentences by setting that say which selectors are static, and why."""
        return {
            setting: [
                f"{title} is static here ({export}): choosing trees did not win on training prompts"
                " held out in turn."
                for title, export in self.titles[setting].exports.items()
            ]
            for setting in self.tables
        }


def _learned(
    title: str, rows: list[Row], methods: dict[str, list[Record]], statics: dict[str, str]
) -> Learned:
    """Compare a learned method with plain decoding, its static tree and transformers' fastest."""
    own = methods.get(title, [])
    outside = max((r for r in rows if r.outside), key=lambda r: r.speedup[0], default=None)
    static = statics.get(title, "")
    return Learned(
        title,
        next((row.speedup for row in rows if row.method == title), []),
        static,
        speed_ratio(own, methods.get(static, [])),
        outside.method if outside else "",
        speed_ratio(own, methods[outside.method]) if outside else None,
    )


def _by_method(
    records: list[Record], figure: Callable[[list[Record]], Any]
) -> dict[str, dict[str, Any]]:
    """Compute `figure` of every method's records, by setting; empty ones are left out."""
    figures: dict[str, dict[str, Any]] = {}
    for setting, methods in by_setting(records).items():
        for name, own in methods.items():
            if value := figure(own):
                figures.setdefault(setting, {})[name] = value
    return figures
