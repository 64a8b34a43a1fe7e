"""Stage selector: measure the latency table, train the NDE selector on the traces, judge it offline, export it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.files import write_json
from data.pair import Pair
from data.store import TraceStore
from pipelines.config import Config
from pipelines.stage import Stage, console
from pipelines.threads import threads
from pipelines.tracking import tracked
from selector.latency import LatencyTable, measure_latency
from selector.offline import offline_report
from selector.roots import roots_from_traces
from selector.training import fit_selector


def settings(config: Config) -> dict[str, Any]:
    model = {"device": config.model.device, "dtype": config.model.dtype}  # what the latency table is measured with
    return {"selector": asdict(config.selector), "threads": config.evaluation.threads, "model": model}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    folder = folders["selector"]
    latency, traces = folder / "latency.json", TraceStore(folders["traces"]).read()
    if not latency.exists():
        target, draft = Pair(folders["pair"]).models(config.model.device, config.model.dtype)
        with threads(config.evaluation.threads):
            contexts = [*config.selector.contexts, int(traces["context"].max())]
            measure_latency(target, draft, contexts).save(latency)
    table = LatencyTable.load(latency)
    training, validation = roots_from_traces(traces, config.selector.verifier, table)
    console.print(f"{len(training)} training roots, {len(validation)} held out")
    with tracked(config, "selector", folder) as tracker:
        selector = fit_selector(training, validation, config.selector, folder / "training", tracker.loggers("selector"))
        selector.save_pretrained(folder / "export")
        report = offline_report(selector, training, validation)
        write_json(folder / "offline.json", report)
        tracker.log(report["all"])
        tracker.artifact(f"{config.run}-selector", "selector", folder / "export")
    overall = report["all"]
    console.print(
        "held-out tokens/s against the best static action: "
        + ", ".join(
            f"{name.replace('_', ' ')} {overall[name][0]:.3f} [{overall[name][1]:.3f}, {overall[name][2]:.3f}]"
            for name in ("selector", "static_l1_0", "split_half")
        )
    )
    return report


STAGE = Stage("selector", "selector", ("pair", "traces"), settings, work)
