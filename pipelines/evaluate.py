"""Stage evaluate: the torch loop on held-out prompts, every method interleaved, and the report."""

import platform
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.files import read_json, write_json
from data.pair import HeldOutPrompt, Pair, check_prompts
from data.trace_config import SETTINGS
from decoding.actions import K_MAX, Action
from decoding.policies.delayed import Autoregressive, Delayed
from decoding.sampling import RAW, SamplingSetting
from decoding.static import MARGIN, StaticShapes
from decoding.verification import VERIFIERS
from draft_training.drafter import EagleDrafter
from evaluation.acceptance import acceptance_by_depth, draft_paths
from evaluation.assisted import transformers_assisted
from evaluation.benchmark import Record, read_records, run_benchmark
from evaluation.methods import TITLES, Bench, selector_title
from evaluation.report import ReportData, render_table, render_versus, write_report
from evaluation.table import BASELINE, tabulate
from evaluation.versus import selectors_versus
from pipelines.config import Config
from pipelines.selector import roots_of, selectors
from pipelines.stage import MANIFEST, Stage, console
from pipelines.tables import TABLE
from pipelines.threads import threads
from pipelines.tracking import Tracker, read_curves, tracked
from selector.latency import LatencyTable
from selector.policy import NeuralPolicy
from selector.selector import Selector

ASSISTED = "transformers assisted"
DEPTHS = 8  # of the paths whose acceptance rates the report shows


def settings(config: Config) -> dict[str, Any]:
    return {
        "evaluation": asdict(config.evaluation),
        "selectors": selectors(config),
        "dtype": config.model.dtype,
        "device": config.model.device,
        "static_shapes": config.model.static_shapes or None,
        "seed": config.seed,
    }


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    evaluation, folder, pair = config.evaluation, folders["evaluate"], Pair(folders["pair"])
    target, draft = pair.models(config.model.device, config.model.dtype)
    table = LatencyTable.load(folders["latency"] / TABLE)
    raw = RAW if config.traces.draft_temperature == "raw" else None
    wanted, main = evaluation.methods, config.selector.verifiers[0]
    prompts = pair.prompts("test", evaluation.prompts, "evaluation.prompts")
    traced = config.traces.train_prompts
    tuning = pair.prompts("trace", traced + evaluation.calibration_prompts, "evaluation.calibration_prompts")[traced:]
    room = evaluation.new_tokens + MARGIN
    check_prompts(prompts + tuning, target, room, min(target.max_context, draft.max_context))
    longest = max(len(prompt.tokens) for prompt in prompts + tuning)
    fixed = StaticShapes(longest + room) if config.model.static_shapes else None
    roots = roots_of(config, folders["traces"], quiet=True)[0]
    bench = Bench(target, draft, roots, table, evaluation.new_tokens, raw, fixed)
    static: dict[str, tuple] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    records = folder / "records.jsonl"
    with threads(evaluation.threads), tracked(config, "evaluate", folder) as tracker:
        for name in evaluation.settings:
            setting = SETTINGS[name]
            static[str(setting)] = bench.static(main, setting)
            methods = {BASELINE: bench.method(BASELINE, Autoregressive(), VERIFIERS[main], setting)}
            if "rules" in wanted:
                methods |= bench.rules(setting)
            if "rivals" in wanted:
                methods |= bench.rivals(main, setting)
            if "selector" in wanted:
                methods |= bench.statics(config.selector.verifiers, setting)
                for own in selectors(config):
                    title = selector_title(own)
                    policy = NeuralPolicy(Selector.from_pretrained(folders["selector"] / "export" / own), table)
                    methods[title] = bench.method(title, policy, policy.verifier, setting)
            if "head" in wanted:
                head = EagleDrafter.from_pretrained(folders["draft"] / "export", target, fixed)
                action = _head_action(folder / f"head-{name}.json", bench, head, main, setting, tuning)
                title = f"{TITLES[main]}, TALF head {tuple(action)}"
                methods[title] = bench.method(title, Delayed(action), VERIFIERS[main], setting, head)
            if "assisted" in wanted:
                methods[ASSISTED] = transformers_assisted(ASSISTED, target, draft, setting, evaluation.new_tokens)
            paths = draft_paths(target, draft, [p.tokens for p in prompts], setting, raw or setting, DEPTHS)
            rates[str(setting)] = acceptance_by_depth(*paths, K_MAX)
            run_benchmark(methods, [(p.id, p.kind, p.tokens) for p in prompts], setting, records, config.seed + evaluation.seed)
        data = report_data(config, folders, list(read_records(records)), static, rates)
        index = write_report(data, folder)
        _track(tracker, data)
    for rendered in (*render_table(data.tables), *render_versus(data.versus)):
        console.print(rendered)
    console.print(f"[bold]report:[/] {index}", soft_wrap=True)
    return {setting: {row.method: row.speedup for row in rows} for setting, rows in data.tables.items()}


def _head_action(
    remembered: Path, bench: Bench, head: EagleDrafter, main: str, setting: SamplingSetting, tuning: list[HeldOutPrompt]
) -> Action:
    """The head's static action, chosen once: a resumed evaluation keeps it."""
    if not remembered.exists():
        write_json(remembered, {"action": bench.head_action(head, main, setting, [p.tokens for p in tuning])})
    return Action(*read_json(remembered)["action"])


def report_data(
    config: Config, folders: dict[str, Path], records: list[Record], static: dict[str, tuple], rates: dict[str, dict]
) -> ReportData:
    """Everything the report shows, from the stages' files."""
    manifests = {name: read_json(folder / MANIFEST) for name, folder in folders.items() if name != "evaluate"}
    curves = {
        name: read_curves(folders[stage] / "curves" / name)
        for stage, name in (
            ("pair", "target"),
            ("pair", "draft"),
            *(("selector", name) for name in selectors(config)),
            ("draft", "head"),
        )
        if stage in folders
    }
    chosen: dict[str, Counter] = {}
    for record in records:
        if record.actions:
            chosen.setdefault(record.setting, Counter()).update(record.actions)
    ablations = Path(config.paths.checkpoints) / config.run / "ablations" / "ablations.json"
    return ReportData(
        run=config.run,
        tables=tabulate(records),
        versus=selectors_versus(records, selectors(config)),
        pair=manifests["pair"]["metrics"],
        offline=manifests["selector"]["metrics"],
        ablations=read_json(ablations) if ablations.exists() else {},
        head=manifests["draft"]["metrics"] if "draft" in manifests else {},
        acceptance=rates,
        curves={name: series for name, series in curves.items() if series},
        chosen={setting: dict(counts) for setting, counts in chosen.items()},
        static=static,
        stages={name: manifest["seconds"] for name, manifest in manifests.items()},
        environment={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {config.evaluation.threads or torch.get_num_threads()} thread(s) while timing",
            "device": config.model.device,
            "dtype": config.model.dtype,
        },
    )


def _track(tracker: Tracker, data: ReportData) -> None:
    columns = ["setting", "method", "block efficiency", "tokens/s", "speedup", "tree nodes"]
    rows = [
        [setting, row.method, row.block_efficiency[0], row.tokens_per_second, row.speedup[0], row.nodes]
        for setting, table in data.tables.items()
        for row in table
    ]
    tracker.table("methods", columns, rows)
    tracker.log({f"{setting}/{method}": speedup for setting, method, _, _, speedup, _ in rows})


def needs(config: Config) -> tuple[str, ...]:
    head = ("draft",) if "head" in config.evaluation.methods else ()
    return ("pair", "latency", "traces", "selector", *head)


STAGE = Stage("evaluate", "report", needs, settings, work)
