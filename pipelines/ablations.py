"""Stage ablations: the main selector trained again without each of its parts, and on less data; one
table, two plots.
"""

import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from nde_talf.decoding.common.files import read_json, write_atomically, write_json
from nde_talf.decoding.common.progress import console, track
from nde_talf.evaluation.plots import learning_curves, tails
from nde_talf.evaluation.text import ablation_table
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.drafted import needs
from nde_talf.pipelines.machine import threads
from nde_talf.pipelines.selector import latency_tables, roots_of, selectors, table_digests
from nde_talf.pipelines.stage import Stage
from nde_talf.pipelines.tracking import tracked
from nde_talf.selector.ablation import Variant, variants
from nde_talf.selector.crossfit import prompt_folds
from nde_talf.selector.evaluate import evaluate_offline
from nde_talf.selector.roots import PricedRoots
from nde_talf.selector.training import fit_selector


def settings(config: Config) -> dict[str, Any]:
    return {"selector": asdict(config.selector), "tables": table_digests(config)}


class Result(TypedDict):
    """Content of a variant's `result.json`, see `_result`."""

    group: str
    value: Any
    training_roots: int
    tables: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    folder, results = folders["ablations"], {}
    tables = latency_tables(config, folders)
    roots = roots_of(config, folders["traces"])
    main, verifiers = next(iter(selectors(config).items()))
    samples, held_out_samples = (split.samples[verifiers[0]].shape[1] for split in roots)
    every = variants(
        samples, held_out_samples, len(roots[0].prompt.unique()), config.selector.folds
    )
    console.print(
        f"{len(every)} variants of the {main} selector, {len(roots[0])} training roots,"
        f" {len(roots[1])} held out"
    )
    with threads(1), tracked(config, "ablations", folder) as tracker:
        for variant in track(every, "ablations", len(every), "variant"):
            own = folder / "variants" / re.sub(r"[^\w.]+", "-", variant.name)
            if not (own / "result.json").exists():
                write_json(
                    own / "result.json", _result(variant, config, roots, verifiers, tables, own)
                )
            results[variant.name] = read_json(own / "result.json", Result)
            overall = results[variant.name]["tables"]
            tracker.log(
                {f"{variant.name}/{table}": own["selector"][0] for table, own in overall.items()}
            )
    write_json(folder / "ablations.json", results)
    (folder / "ablations.md").write_text(ablation_table(results))
    for name, figure in (("learning_curves", learning_curves(results)), ("tail", tails(results))):
        write_atomically(
            folder / f"{name}.png", lambda path, figure=figure: figure.savefig(path, format="png")
        )
    console.print(ablation_table(results))
    console.print(f"plots: {folder}/*.png", soft_wrap=True)
    return results


def _result(
    variant: Variant, config: Config, roots, verifiers, tables, folder: Path
) -> dict[str, Any]:
    """Held-out figures of one variant under every latency table; whatever prices it learned and
    chose by, the table's count.
    """
    own, (known, other) = (
        replace(config.selector, **variant.config),
        roots[::-1] if variant.exchanged else roots,
    )
    held_out = variant.validation(other)
    priced = partial(PricedRoots.of, verifiers=verifiers, tables=list(tables.values()))
    training = priced(variant.training(known), rule=own.pricing)
    stopping = (
        prompt_folds(training.roots.prompt, own.folds) == 0
    )  # one fold says when to stop, for every variant alike
    training, stopping = training.where(~stopping), training.where(stopping)
    selector, _ = fit_selector(training, stopping, own, folder, progress=False)
    seen, splits = priced(held_out, rule=own.pricing), (priced(known), priced(held_out))
    found = {
        name: evaluate_offline(selector, *splits, i, seen=seen) for i, name in enumerate(tables)
    }
    return {
        "group": variant.group,
        "value": variant.value,
        "training_roots": len(training),
        "tables": {
            name: {"roots": len(held_out), **figures["all"]} for name, figures in found.items()
        },
        "settings": {
            name: {k: v["selector"] for k, v in x["settings"].items()} for name, x in found.items()
        },
    }


STAGE = Stage(
    "ablations", "ablations", lambda config: (*needs(config), "latency", "traces"), settings, work
)
