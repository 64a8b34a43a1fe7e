"""Stage traces: target trajectories, roots with features, and Eq. 3 labels by super-trees, in Parquet shards."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.pair import Pair, check_prompts
from data.progress import track
from data.store import TraceStore
from data.traces import SETTINGS, TracePrompt, trace_group
from pipelines.config import Config
from pipelines.stage import Stage, console
from pipelines.tracking import tracked


def settings(config: Config) -> dict[str, Any]:
    traces = asdict(config.traces)
    traces.pop("micro_batch")
    return {"traces": traces}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    traces, pair, store = config.traces, Pair(folders["pair"]), TraceStore(folders["traces"])
    target, draft = pair.models(config.model.device, traces.dtype)
    count = traces.train_prompts + traces.validation_prompts
    held_out = pair.prompts("trace", count, "traces.train_prompts + traces.validation_prompts")
    check_prompts(held_out, target, traces.new_tokens + 17, min(target.max_context, draft.max_context))
    prompts = [
        TracePrompt(p.id, p.kind, "train" if i < traces.train_prompts else "validation", p.tokens)
        for i, p in enumerate(held_out)
    ]
    size = traces.shard_prompts
    work_units = [(name, prompts[at : at + size]) for at in range(0, len(prompts), size) for name in traces.settings]
    names = [store.name(i, len(work_units)) for i in range(len(work_units))]
    todo = [i for i, name in enumerate(names) if not store.holds(name)]
    if len(todo) < len(names):
        console.print(f"resuming: {len(names) - len(todo)} of {len(names)} shards are there")
    with tracked(config, "traces", folders["traces"]) as tracker:
        for i in track(todo, "trace", len(names), "shard", len(names) - len(todo)):
            name, group = work_units[i]
            columns = trace_group(target, draft, group, SETTINGS[name], traces, seed=traces.seed * 1_000_003 + i)
            store.write(names[i], columns)
        rows = sum(shard["rows"] for shard in store.shards.values())
        metrics = {"roots": rows, "shards": len(names)}
        tracker.log(metrics)
    console.print(f"{rows} roots in {len(names)} shards: {folders['traces']}/*.parquet")
    return metrics


def whole(folder: Path) -> bool:
    """Whether every shard is there; a damaged one is a UserError that names it."""
    store = TraceStore(folder)
    return all(store.holds(name) for name in store.shards)


STAGE = Stage("traces", "traces", ("pair",), settings, work, whole)
