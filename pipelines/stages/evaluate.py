"""Stage evaluate: the torch loop on held-out prompts, every method interleaved, and the report."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.markdown import Markdown

from nde_talf.data.text.pair import Pair, check_prompts
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.static_shapes import MARGIN, StaticShapes
from nde_talf.decoding.recorded_step import SHAPES
from nde_talf.decoding.sampling.sampling_setting import AUTO, MATCH
from nde_talf.decoding.threads import threads
from nde_talf.evaluation.benchmark import Record, read_records, run_benchmark
from nde_talf.evaluation.environment import conditions, environment
from nde_talf.evaluation.methods import plan_methods
from nde_talf.evaluation.plan import Plan
from nde_talf.evaluation.report import write_report
from nde_talf.evaluation.report_data import ReportData
from nde_talf.evaluation.table import Row
from nde_talf.pipelines.config.schema import (
    OF_DRAFTER,
    TABLE,
    Config,
    EvaluationConfig,
    ModelConfig,
)
from nde_talf.pipelines.runs.run_models import load_drafted, timed_on
from nde_talf.pipelines.runs.tracking import Tracker, read_curves
from nde_talf.pipelines.stages.benches import benches
from nde_talf.pipelines.stages.stage import Stage
from nde_talf.selector.prices import LatencyTable

FEWEST_PROMPTS, DECODING_SECONDS = 12, 165  # of evaluation.prompts=null


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    chosen, asked = asdict(config.evaluation), {*config.evaluation.methods}
    for group in {"policies", "ngram"} - asked:
        del chosen[group]
    traces, nobody = config.traces, config.drafter == "nobody"  # then they are no stage of the run
    alone = {"tuned": traces.train_prompts} if nobody else {}
    return {
        **timed_on(config.model, config.drafter),
        **alone,
        "evaluation": chosen,
        "selectors": config.selector.verifiers,
        "seed": config.seed,
    }


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Decode with every method, and write the report; return the figures for the manifest."""
    evaluation, folder, pair = config.evaluation, folders["evaluate"], Pair(folders["pair"])
    models = load_drafted(config, folders)
    prompts, tuning, fixed = _prompts(config, pair, models)
    made = benches(config, folders, models, tuning, fixed)
    for notice in _notices(config, next(iter(made.values())).assists):
        console.print(notice)
    plans = {}
    records = folder / "records.jsonl"
    blocks = [(prompt.id, prompt.kind, prompt.tokens) for prompt in prompts]
    with threads(evaluation.threads):
        for name, bench in made.items():
            setting = SETTINGS[name]
            console.print(f"{setting}: choosing trees, some by timing them ...", style="dim")
            plan = plans[str(setting)] = plan_methods(bench, config.method_groups)
            titles = {"setting": str(setting), **asdict(plan.titles)}
            write_json(folder / f"roles-{name}.json", titles)
            if len(plans) == 1:
                count = evaluation.most_prompts
                if config.drafter != "nobody":
                    count = _affordable(evaluation, folders["latency"], len(plan.methods))
                blocks = blocks[:count]
            run_benchmark(plan.methods, blocks, setting, records, config.seed)
        data = report_data(config, folders, list(read_records(records)), plans)
        write_report(data, folder)
        tracker.report(folder)
    return {
        setting: {row.method: _figures(row) for row in rows}
        for setting, rows in data.tables.items()
    }


def _figures(row: Row) -> dict[str, float]:
    """Return the figures of a method for the manifest and the tracker."""
    figures = dict(zip(("speedup", "low", "high"), row.speedup, strict=True))
    return figures | {"block efficiency": row.block_efficiency[0], "tree nodes": row.nodes}


def _machine(model: ModelConfig, drafter: str, threads: int) -> tuple[str, str, int]:
    timed = timed_on(model, drafter)
    kind = " and a draft in ".join(timed[key] for key in ("dtype", "draft_dtype") if key in timed)
    return model.device, kind, threads or torch.get_num_threads()


def _affordable(evaluation: EvaluationConfig, latency: Path, methods: int) -> int:
    """Return how many prompts to decode: those asked for, or what a slow machine has time for."""
    most = evaluation.most_prompts
    if evaluation.prompts:
        return most
    table = LatencyTable.load(latency / TABLE)
    generations = methods * len(evaluation.settings)  # of each prompt
    token = float(table.plain(torch.tensor(table.contexts[:1])))
    seconds = generations * evaluation.new_tokens * token
    count = min(most, max(FEWEST_PROMPTS, int(DECODING_SECONDS / seconds)))
    if count < most:
        console.print(
            f"· {count} of {most} prompts, which decode in about {DECODING_SECONDS / 60:.0f}"
            f" minutes here; evaluation.prompts={most}: all of them"
        )
    return count


def _prompts(
    config: Config, pair: Pair, models: Sequence[Any]
) -> tuple[list[Prompt], list[Prompt], StaticShapes | None]:
    """Return the prompts to decode, those to tune on, and the shapes that hold them all.

    Raises UserError for one that does not fit a model.
    """
    evaluation, traced = config.evaluation, config.traces.train_prompts
    prompts = pair.prompts("test", evaluation.most_prompts, "evaluation.prompts")
    count = traced + evaluation.calibration_prompts
    tuning = pair.prompts("trace", count, "evaluation.calibration_prompts")[traced:]
    room, every = evaluation.new_tokens + MARGIN, prompts + tuning
    check_prompts(every, room, *filter(None, models))
    longest = max(len(prompt.tokens) for prompt in every)
    shapes = SHAPES[config.model.graphs](longest + room)
    return prompts, tuning, shapes if config.model.static_shapes else None


def _without_labels(settings: list[str], traced: list[str], groups: set[str]) -> str:
    """Note what greedy decoding lacks where it was not traced; empty where all were traced."""
    names, missing = {*settings} - {*traced}, {"selector", "rules", "baselines"} & groups
    if not names or not missing:
        return ""
    return f"{', '.join(names)} not traced, so no {', '.join(sorted(missing))} there"


def _notices(config: Config, assists: bool) -> Iterator[str]:
    """Name what was asked for and is left out, or is worse than it could be."""
    groups, asked = config.method_groups, config.evaluation.draft_temperature
    if asked not in (AUTO, MATCH) and {"selector", "rules", "baselines"} & groups:
        yield (
            f"! evaluation.draft_temperature={asked}, but the labels that choose trees are of"
            " drafts warped as the target is: these trees may be poor ones. The text stays"
            " lossless."
        )
    if left_out := {*config.evaluation.methods} - groups:
        yield f"· no {', '.join(sorted(left_out))}: no draft model drafts here"
    if "assisted" in groups and not assists:
        yield (
            "· no assisted: transformers' assisted generation takes a draft model with as many"
            " output rows as the target"
        )
    if note := _without_labels(config.evaluation.settings, config.traces.settings, groups):
        yield f"! {note}: add them to traces.settings for labels."


def show(folder: Path) -> None:
    """Print the results of a finished evaluation."""
    console.print(Markdown((folder / "results.md").read_text("utf-8")))
    console.print(f"report: {folder / 'index.html'}")


def report_data(
    config: Config, folders: dict[str, Path], records: list[Record], plans: dict[str, Plan]
) -> ReportData:
    """Collect the report's content from records, plans and the stages' files."""
    evaluation = config.evaluation
    machine = _machine(config.model, config.drafter, evaluation.threads)
    measured = [
        f"{len({record.prompt for record in records})} held-out prompts, up to"
        f" {evaluation.new_tokens} tokens each",
        "all trees are the draft head's" * (config.drafter == "head"),
        _without_labels(evaluation.settings, config.traces.settings, config.method_groups),
    ]
    return ReportData.of(
        config.run,
        records,
        conditions(*machine),
        measured="; ".join(filter(None, measured)),
        titles={setting: plan.titles for setting, plan in plans.items()},
        curves=_curves(config.selector.verifiers, folders),
        environment=environment(*machine),
    )


def _curves(selectors: Iterable[str], folders: dict[str, Path]) -> dict[str, dict]:
    """Return the curves of every training."""
    of_selectors = dict.fromkeys(selectors, "selector")
    stages = {"target": "pair", "draft": "pair", **of_selectors, "head": "draft"}
    return {
        name: series
        for name, stage in stages.items()
        if stage in folders and (series := read_curves(folders[stage] / "curves" / name))
    }


def needs(config: Config) -> tuple[str, ...]:
    """Return the names of the stages that the evaluation needs."""
    of_drafter = OF_DRAFTER if config.drafter != "nobody" else ()
    with_head = "head" in config.method_groups or config.drafter == "head"
    return ("pair", *of_drafter, *(("draft",) if with_head else ()))


STAGE = Stage("evaluate", "report", needs, settings, work, show=show)
