"""Stage selector: train NDE selectors on the traces, evaluate them offline, export them."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.threads import threads
from nde_talf.pipelines.config.schema import MEASURED, Config, LatencyConfig, table_file
from nde_talf.pipelines.runs.run_models import load_drafted, needs
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.stage import Stage
from nde_talf.selector.network import Selector
from nde_talf.selector.offline_evaluation import evaluate_offline
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import PricedRoots, Roots, roots_from_traces, setting_title
from nde_talf.selector.training import CrossFit, train_selector


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    name = config.selector.table
    digest = None if name == MEASURED else file_digest(table_file(name, Path()))
    return {"selector": asdict(config.selector), "table": digest}


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Train, evaluate and export the selectors; return the figures for the manifest."""
    folder, asked = folders["selector"], config.selector
    models = load_drafted(config, folders)
    here = not config.model.target
    table = latency_table(asked.table, folders["latency"], models, config.latency, here)
    splits = roots_of(folders["traces"], config.traces.verifiers)
    size = f"{len(splits[0])} training roots, {len(splits[1])} held out"
    console.print(size)
    report = {}
    # More threads only get into each other's way.
    with threads(1):
        for name in asked.verifiers:
            export = folder / "export" / name
            training, held_out = (
                PricedRoots.of(roots, name, table, asked.pricing) for roots in splits
            )
            selector, crossed = train_selector(
                training, held_out, asked, folder / "training" / name, tracker.loggers(name), name
            )
            _tell(name, splits[0].settings, selector, crossed)
            found = evaluate_offline(selector, training, held_out)
            report[name] = {asked.table: found}
            gain = shown(found["all"]["selector"], 3)
            console.print(f"{name}: {gain} of its best static tree's tokens/s, held out")
            facts = {"roots": size, "latency table": asked.table}
            figures = {f"of the best static tree's tokens/s, table {asked.table}": gain}
            selector.save_pretrained(export, facts, figures)
    write_json(folder / "offline.json", report)
    return report


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


def latency_table(
    name: str, folder: Path, models: tuple[Any, Any], asked: LatencyConfig, trained_here: bool
) -> LatencyTable:
    """Load a latency table; a measured one is in `folder`.

    Raises UserError for one of another pair, or one measured on a machine under load.
    """
    path = table_file(name, folder)
    table = LatencyTable.load(path)
    table.check_models(*models, path)
    if not asked.accepts_noise(trained_here and name == MEASURED):
        table.check_quiet(path)
    return table


STAGE = Stage(
    "selector", "selector", lambda config: (*needs(config), "latency", "traces"), settings, work
)
