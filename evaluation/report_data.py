"""The numbers of the report, from records and from the stages' figures."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nde_talf.decoding.common.bootstrap import times
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.protocol import trusted
from nde_talf.evaluation.table import (
    Row,
    acceptance_by_position,
    by_kind,
    by_setting,
    control_of,
    ended,
    histogram,
    steps_by_tree,
    tabulate,
)
from nde_talf.evaluation.verdict import Verdict, verdict


@dataclass
class ReportData:
    """The numbers of the report; an empty part is left out.

    Attributes:
        run: name of the run.
        tables: rows by setting.
        verdicts: by setting.
        kinds: by setting and domain, rows.
        histograms: by setting and method, steps by accepted tokens.
        chosen: by setting and selector, steps by tree.
        measured: amount of decoded text, in words.
        ended: by setting, texts that ended by themselves, in words.
        learned: by setting, titles of methods with something learned.
        same: by setting, methods not decoded, and the equal one that was.
        exports: by setting, for selectors that exported a static tree, its method.
        pair: held-out figures of the pair.
        offline: by selector and latency table, see `nde_talf.selector.offline_evaluation`.
        head: held-out figures of the draft head.
        curves: by training, its series.
        stages: seconds by stage.
        environment: circumstances of the measurement.
        sample: a decoded text.
    """

    run: str
    tables: dict[str, list[Row]]
    verdicts: dict[str, Verdict]
    kinds: dict[str, dict[str, list[Row]]]
    histograms: dict[str, dict[str, list[int]]]
    chosen: dict[str, dict[str, dict[str, int]]]
    ended: dict[str, str]
    measured: str
    learned: dict[str, list[str]]
    same: dict[str, dict[str, str]]
    exports: dict[str, dict[str, str]]
    pair: dict[str, Any]
    offline: dict[str, Any]
    head: dict[str, Any]
    curves: dict[str, dict[str, list[tuple[int, float]]]]
    stages: dict[str, float]
    environment: dict[str, str]
    sample: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: str, records: list[Record], conditions: str, **parts: Any) -> "ReportData":
        """Compute the fields that follow from records. conditions: see `verdict`; parts: others."""
        tables = tabulate(records)
        return cls(
            run,
            tables,
            {s: verdict(s, rows, conditions, records) for s, rows in tables.items()},
            by_kind(records),
            _by_method(records, histogram),
            _by_method(records, steps_by_tree),
            {s: ended(record for record in records if record.setting == s) for s in tables},
            **parts,
        )

    @property
    def positions(self) -> dict[str, dict[str, list[float]]]:
        """Acceptance by position, by setting and method that drafts."""
        return {
            setting: rates
            for setting, methods in self.histograms.items()
            if (rates := {m: acceptance_by_position(c) for m, c in methods.items() if len(c) > 1})
        }

    @property
    def standing(self) -> dict[str, list[str]]:
        """Sentences by setting: reasons for static selectors, places of other learned methods."""
        sentences: dict[str, list[str]] = {}
        for setting, rows in self.tables.items():
            sentences[setting] = [
                f"{title} is static here ({export}): choosing trees did not win on training prompts"
                " held out in turn."
                for title, export in self.exports.get(setting, {}).items()
            ]
            control = control_of(rows)
            sentences[setting] += [
                f"{row.method}, learned here: {times(row.speedup)} plain decoding, place"
                f" {place} of {len(rows)}."
                for place, row in enumerate(sorted(rows, key=lambda r: -r.speedup[0]), 1)
                if row.method in self.learned.get(setting, ())
                and trusted(control, row.speedup) is not False
            ]
        return sentences


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
