"""Stage evaluate: the torch loop on held-out prompts, every method interleaved, and the report."""

import platform
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.files import read_json, write_json
from data.pair import Pair, check_prompts
from data.store import TraceStore
from data.traces import SETTINGS
from decoding.errors import UserError
from draft_training.drafter import EagleDrafter
from evaluation.assisted import transformers_assisted
from evaluation.benchmark import read_records, run_benchmark
from evaluation.methods import Bench
from evaluation.report import ReportData, render_table, write_report
from evaluation.table import tabulate
from pipelines.config import STAGES, Config
from pipelines.stage import MANIFEST, Stage, console
from pipelines.threads import threads
from pipelines.tracking import read_curves, tracked
from selector.latency import LatencyTable
from selector.policy import NeuralPolicy
from selector.roots import roots_from_traces
from selector.selector import Selector

VERIFIERS_NEEDED = ("specinfer", "naivetree", "traversal")


def settings(config: Config) -> dict[str, Any]:
    return {"evaluation": asdict(config.evaluation), "model": {"dtype": config.model.dtype}, "seed": config.seed}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    evaluation, folder = config.evaluation, folders["evaluate"]
    pair = Pair(folders["pair"])
    target, draft = pair.models(config.model.device, config.model.dtype)
    table = LatencyTable.load(folders["selector"] / "latency.json")
    traces = TraceStore(folders["traces"]).read()
    bench = Bench(
        target, draft, {v: roots_from_traces(traces, v, table)[0] for v in VERIFIERS_NEEDED}, evaluation.new_tokens
    )
    head = EagleDrafter.from_pretrained(folders["draft"] / "export", target)
    prompts = pair.prompts("test", evaluation.prompts, "evaluation.prompts")
    calibration = pair.prompts("trace", evaluation.calibration_prompts, "evaluation.calibration_prompts")
    context = min(target.max_context, draft.max_context)
    check_prompts(prompts + calibration, target, evaluation.new_tokens + 17, context)
    chosen: dict[str, dict] = {}
    static: dict[str, tuple] = {}
    with threads(evaluation.threads), tracked(config, "evaluate", folder) as tracker:
        for name in evaluation.settings:
            setting = SETTINGS[name]
            methods = bench.static_methods(setting)
            policy = NeuralPolicy(Selector.from_pretrained(folders["selector"] / "export"), table)
            methods["SpecInfer + selector (NDE)"] = bench.method("SpecInfer + selector (NDE)", policy, "specinfer", setting)
            action = _remembered(folder, name, lambda s=setting: bench.head_action(head, s, [p.tokens for p in calibration]))
            title = f"SpecInfer, TALF head {action}"
            methods[title] = bench.method(title, _delayed(action), "specinfer", setting, head)
            if evaluation.assisted:
                title = "transformers assisted generation"
                methods[title] = transformers_assisted(title, target, draft, setting, evaluation.new_tokens)
            run_benchmark(
                methods, [(p.id, p.kind, p.tokens) for p in prompts], setting, folder / "records.jsonl", config.seed
            )
            chosen[str(setting)] = {str(tuple(a)): n for a, n in policy.chosen.items()}
            static[str(setting)] = next(m for m in methods if m.startswith("SpecInfer ("))
        tables = tabulate(list(read_records(folder / "records.jsonl")))
        data = ReportData()
        write_report(data, folder)
    for rendered in render_table(tables):
        console.print(rendered)
    console.print(f"report: {folder / 'index.html'}")
    return {}


STAGE = Stage("evaluate", "report", ("pair", "traces", "selector", "draft"), settings, work)
