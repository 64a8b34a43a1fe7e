"""Stage selector: train NDE selectors on the traces, evaluate them offline, export them.

They are evaluated under every latency table.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.markdown import Markdown

from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.sampling.sampling_setting import RAW
from nde_talf.decoding.threads import threads
from nde_talf.evaluation.table import markdown
from nde_talf.pipelines.config.schema import MEASURED, Config, table_file
from nde_talf.pipelines.runs.run_models import load_drafted, needs
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.stage import Stage
from nde_talf.selector.fingerprint import fingerprint
from nde_talf.selector.network import Selector
from nde_talf.selector.offline_evaluation import evaluate_offline
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import PricedRoots, Roots, draft_only, roots_from_traces, setting_title
from nde_talf.selector.training import CrossFit, train_selector


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    files = {name: table_file(name, Path()) for name in config.selector.tables if name != MEASURED}
    digests = {name: file_digest(file) for name, file in files.items()}
    return {"selector": asdict(config.selector), "tables": digests}


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Train, evaluate and export the selectors; return the figures for the manifest."""
    folder, asked = folders["selector"], config.selector
    models = load_drafted(config, folders)
    tables = latency_tables(config, folders, models)
    raw = config.traces.draft_temperature == "raw"
    origin: dict[str, Any] = {
        "draft_setting": (RAW.temperature, RAW.top_p) if raw else None,
        "pair": dict(zip(("target", "draft"), map(fingerprint, models), strict=True)),
    }
    splits = roots_of(folders["traces"], config.traces.verifiers)
    if asked.features == "draft":
        splits = draft_only(splits[0]), draft_only(splits[1])
    size = f"{len(splits[0])} training roots, {len(splits[1])} held out"
    console.print(size)
    report = {}
    # More threads only get into each other's way.
    with threads(1):
        for name in asked.verifiers:
            export = folder / "export" / name
            training, held_out = (
                PricedRoots.of(roots, name, [*tables.values()], asked.pricing) for roots in splits
            )
            selector, crossed = train_selector(
                training, held_out, asked, folder / "training" / name, tracker.loggers(name), name
            )
            selector.table = tables.get(MEASURED, selector.table)
            selector.schema = replace(selector.schema, **origin)
            _tell(name, splits[0].settings, selector, crossed)
            report[name] = {
                table: evaluate_offline(selector, training, held_out, i)
                for i, table in enumerate(tables)
            }
            of_all = {table: of["all"] for table, of in report[name].items()}
            figures = {
                f"of the best static tree's tokens/s, table {table}": shown(of["selector"], 3)
                for table, of in of_all.items()
            }
            facts = {"roots": size, "latency tables": list(tables)}
            selector.save_pretrained(export, facts, figures)
            tracker.artifact(f"{config.run}-selector-{name}", "selector", export)
    write_json(folder / "offline.json", report)
    console.print(_table(report))
    return report


def _table(report: dict[str, dict]) -> Markdown:
    """Show held-out tokens/s of selectors against their own best static trees."""
    rows = []
    for name, tables in report.items():
        for latency, figures in tables.items():
            bounds = figures["all"]
            possible = f"{bounds['split_half'][0]:.2f}–{bounds['same_half'][0]:.2f}"
            rows.append([name, latency, shown(bounds["selector"], 3), possible])
    title = "Held-out tokens/s against the selector's own best static trees:\n\n"
    return Markdown(title + markdown(["selector", "latency", "NDE", "root by root"], rows))


def _tell(
    name: str, settings: Sequence[tuple[float, float]], selector: Selector, crossed: CrossFit
) -> None:
    """Print where choosing won too little."""
    for setting, gain, learned in zip(
        settings, crossed.gains, selector.schema.learned, strict=True
    ):
        if not learned:
            value, low, high = gain
            console.print(
                f"· {name}, {setting_title(setting)}: on training prompts held out in turn,"
                f" choosing gets {value:.3f} [{low:.3f}, {high:.3f}] of the best static tree's"
                " tokens/s: too little, so that tree is exported."
            )


def roots_of(traces: Path, verifiers: Sequence[str]) -> tuple[Roots, Roots]:
    """Load training and validation roots with the labels of `verifiers` from the traces' folder."""
    store, splits = TraceStore(traces), []
    for split in ("train", "validation"):
        if not (columns := store.read(split)):
            raise UserError(f"{traces}: it holds no {split} roots: raise traces.{split}_prompts.")
        splits.append(roots_from_traces(columns, verifiers))
    training, validation = splits
    if missing := {*validation.settings} - {*training.settings}:
        raise UserError(f"the traces hold no training roots for {setting_title(min(missing))}.")
    at = torch.tensor([training.settings.index(pair) for pair in validation.settings])
    return training, replace(validation, settings=training.settings, setting=at[validation.setting])


def latency_tables(
    config: Config, folders: dict[str, Path], models: tuple[Any, Any]
) -> dict[str, LatencyTable]:
    """Load the latency tables by name.

    Raises UserError for one of another pair, or one measured on a machine under load.
    """
    tables = {}
    for name in config.selector.tables:
        path = table_file(name, folders["latency"])
        table = tables[name] = LatencyTable.load(path)
        table.check_models(*models, path)
        if not config.latency.accepts_noise(name == MEASURED and not config.model.target):
            table.check_quiet(path)
    return tables


STAGE = Stage(
    "selector", "selector", lambda config: (*needs(config), "latency", "traces"), settings, work
)
