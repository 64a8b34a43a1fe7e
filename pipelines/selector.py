"""Stage selector: train NDE selectors on the traces, evaluate them offline, export them.

They are evaluated under every latency table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.markdown import Markdown

from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.sampling import RAW
from nde_talf.evaluation.table import markdown
from nde_talf.pipelines.config import MEASURED, Config, table_file
from nde_talf.pipelines.drafted import load_drafted, needs
from nde_talf.pipelines.machine import threads
from nde_talf.pipelines.manifest import read_manifest
from nde_talf.pipelines.stage import Stage
from nde_talf.pipelines.tracking import tracked
from nde_talf.selector.evaluate import evaluate_offline
from nde_talf.selector.export import write_selector_card
from nde_talf.selector.fingerprint import fingerprint
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.roots import PricedRoots, Roots, draft_only, roots_from_traces, setting_title
from nde_talf.selector.rows import columns
from nde_talf.selector.settings import SelectorConfig
from nde_talf.selector.train import CrossFit, train_selector

ACROSS = "across"


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    files = {name: table_file(name, Path()) for name in config.selector.tables if name != MEASURED}
    digests = {name: file_digest(file) for name, file in files.items()}
    return {"selector": asdict(config.selector), "tables": digests}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    """Train, evaluate and export the selectors; return the figures for the manifest."""
    folder = folders["selector"]
    models = load_drafted(config, folders)
    tables = latency_tables(config, folders, models)
    raw = config.traces.draft_temperature == "raw"
    origin: dict[str, Any] = {
        "draft_setting": (RAW.temperature, RAW.top_p) if raw else None,
        "pair": dict(zip(("target", "draft"), map(fingerprint, models), strict=True)),
    }
    run = Path(config.paths.checkpoints) / config.run
    splits = roots_of(folders["traces"], config.traces.verifiers, run, _warn)
    if config.selector.features == "draft":
        splits = draft_only(splits[0]), draft_only(splits[1])
    console.print(f"{len(splits[0])} training roots, {len(splits[1])} held out")
    report = {}

    def priced(verifiers: list[str]) -> tuple[PricedRoots, PricedRoots]:
        train, held_out = (
            PricedRoots.of(r, verifiers, [*tables.values()], config.selector.pricing)
            for r in splits
        )
        return train, held_out

    # More threads only get into each other's way.
    with threads(1), tracked(config, "selector", folder) as tracker:
        for name, verifiers in selectors(config.selector).items():
            ours, export = priced(verifiers), folder / "export" / name
            selector, crossed = train_selector(
                *ours, config.selector, folder / "training" / name, tracker.loggers(name), name
            )
            selector.table = tables.get(MEASURED, selector.table)
            selector.schema = replace(selector.schema, **origin)
            selector.save_pretrained(export)
            gains = zip(splits[0].settings, crossed.gains, selector.schema.learned, strict=True)
            for setting, gain, learned in gains:
                if not learned:
                    console.print(f"· {_nothing_won(name, setting, gain)}")
            console.print(f"· {name}: {_learning(crossed, folders['traces'])}")
            by_table = report[name] = {
                table: {**evaluate_offline(selector, *ours, i), "curve": crossed.curve}
                for i, table in enumerate(tables)
            }
            facts = {
                "roots": f"{len(splits[0])} training, {len(splits[1])} held out",
                "latency tables": list(tables),
            }
            figures = {
                f"of the best static tree's tokens/s, table {table}": of["all"]["selector"]
                for table, of in by_table.items()
            }
            write_selector_card(selector.schema, export, facts, figures)
            tracker.log({f"{name}/{table}": of["all"] for table, of in by_table.items()})
            tracker.log({f"{name}/twice the prompts": crossed.doubling})
            tracker.artifact(f"{config.run}-selector-{name}", "selector", export)
    write_json(folder / "offline.json", report)
    console.print(_table(report))
    return report


def _table(report: dict[str, dict]) -> Markdown:
    """Show held-out tokens/s of selectors against their own best static trees."""
    rows = []
    for name, tables in report.items():
        for latency, figures in tables.items():
            (value, low, high), bounds = figures["all"]["selector"], figures["all"]
            possible = f"{bounds['split_half'][0]:.2f}–{bounds['same_half'][0]:.2f}"
            rows.append([name, latency, f"{value:.3f}±{(high - low) / 2:.3f}", possible])
    title = "Held-out tokens/s against the selector's own best static trees:\n\n"
    return Markdown(title + markdown(["selector", "latency", "NDE", "root by root"], rows))


def _warn(text: str) -> None:
    console.print(f"! {text}")


def _nothing_won(name: str, setting: tuple[float, float], gain: list[float]) -> str:
    value, low, high = gain
    return (
        f"{name}, {setting_title(setting)}: on training prompts held out in turn, choosing gets"
        f" {value:.3f} [{low:.3f}, {high:.3f}] of the best static tree's tokens/s: too little, so"
        " that tree is exported."
    )


def _learning(crossed: CrossFit, traces: Path) -> str:
    """Say what more traces would bring, from the learning curve, and what they would cost."""
    seconds = read_manifest(traces)["seconds"]
    points = ", ".join(f"{n:.0f} prompts {ratio:.3f}" for n, ratio, *_ in crossed.curve)
    more = "more is not known of so few"
    if math.isfinite(crossed.doubling):
        more = f"the last doubling brought {100 * crossed.doubling:+.1f} %, and twice the prompts"
        more += f" would hardly bring more, for {seconds / 60:.0f} min of traces"
    return f"of the best static tree's tokens/s, held out: {points}; {more}"


def selectors(asked: SelectorConfig) -> dict[str, list[str]]:
    """Return the selectors asked for, each with the verifiers that it chooses among.

    The first is the main one.
    """
    alone = {name: [name] for name in asked.verifiers}
    return alone | ({ACROSS: [*alone]} if asked.across else {})


def roots_of(
    traces: Path, verifiers: Sequence[str], run: Path, say: Callable[[str], object]
) -> tuple[Roots, Roots]:
    """Load training and validation roots with the labels of `verifiers`.

    Args:
        traces: folder of the stage.
        verifiers: traced rules.
        run: folder that what is laid out anew goes to.
        say: receives a warning for every setting with few roots.
    """
    store, splits = TraceStore(traces), []
    for split in ("train", "validation"):
        small, large = columns(store, split, run)
        if not small:
            raise UserError(f"{traces}: it holds no {split} roots: raise traces.{split}_prompts.")
        splits.append(roots_from_traces(small, verifiers, say, large))
    return splits[0], splits[1]


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
        trained_here = name == MEASURED and not config.model.target
        if not config.latency.accepts_noise(trained_here):
            table.check_quiet(path)
    return tables


STAGE = Stage(
    "selector", "selector", lambda config: (*needs(config), "latency", "traces"), settings, work
)
