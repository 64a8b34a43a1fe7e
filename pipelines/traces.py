"""Stage traces: the target's trajectories, roots with features, and labels (Eq. 3 of the NDE paper) from super-trees."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from data.engines.settings import EngineConfig
from data.text.pair import Pair, check_prompts
from data.traces.budget import check_disk, predicted
from data.traces.store import TraceStore
from data.traces.worker import Tracer, Unit, units
from decoding.common.errors import UserError
from decoding.common.parallel import map_units
from decoding.common.progress import console, track
from pipelines.config import Config
from pipelines.stage import Stage
from pipelines.tracking import tracked

SUPER_TREE_DEPTH = 17
"""Tokens after a root that a context has to have room for."""


def settings(config: Config) -> dict[str, Any]:
    traces = {name: value for name, value in asdict(config.traces).items() if name not in ("micro_batch", "node_chunk")}
    return {"traces": traces, "engine": {"name": config.engine.name}}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    traces, store = config.traces, TraceStore(folders["traces"])
    train, wanted = traces.train_prompts, traces.train_prompts + traces.validation_prompts
    found = Pair(folders["pair"]).prompts("trace", wanted, "traces.train_prompts + traces.validation_prompts")
    prompts = [replace(p, split="train" if i < train else "validation") for i, p in enumerate(found)]
    longest = max(len(prompt.tokens) for prompt in prompts) + traces.new_tokens + SUPER_TREE_DEPTH
    engine = chosen_engine(config, config.engine.max_length or longest)
    make = partial(Tracer, folders["pair"], traces, config.model.device, engine, config.model.threads)
    tracer, everything = make(), units(prompts, traces)
    names = [store.name(i, len(everything)) for i in range(len(everything))]
    for name, fault in store.faults().items():
        console.print(f"[yellow]↻[/] {name}: {fault}; it is made again")
    todo = [i for i, name in enumerate(names) if not store.holds(name)]
    if len(todo) < len(names):
        console.print(f"resuming: {len(names) - len(todo)} of {len(names)} shards are there")
    with tracked(config, "traces", folders["traces"]) as tracker:
        if todo:
            target, draft = tracer.models
            check_prompts(prompts, target, traces.new_tokens + SUPER_TREE_DEPTH, min(target.max_context, draft.max_context))
            budget = predicted(tracer, [everything[i] for i in todo], config.engine.workers)
            console.print(f"{engine.name}: {budget}")
            tracker.log({"predicted": asdict(budget)})
            check_disk(folders["traces"], budget)
            if config.engine.workers > 1:
                tracer.close()  # the workers have models of their own
            run = partial(_run, config, engine, make if config.engine.workers > 1 else lambda: tracer)
            drawn = _drawn(run, folders["traces"] / "drawn", everything, todo) if engine.name == "vllm" else lambda i: ()
            items = ((everything[i], *drawn(i)) for i in todo)
            for i, columns in run("trace", items, len(todo), "trace", len(names)):
                store.write(names[todo[i]], columns)
        if not store.roots:
            raise UserError(
                f"the target ended its text at once after every one of {len(prompts)} prompts: there is no root to trace. Are "
                "these prompts complete texts already?"
            )
        metrics = {"roots": store.roots, "shards": len(names)}
        tracker.log(metrics)
        tracker.artifact(f"{config.run}-traces", "traces", folders["traces"], copied=False)
    console.print(f"{store.roots} roots in {len(names)} shards: {folders['traces']}/*.parquet")
    return metrics


def _run(
    config: Config, engine: EngineConfig, make, method: str, items: Iterable[tuple], count: int, title: str, total: int
) -> Iterator[tuple[int, Any]]:
    """map_units over `count` items under a progress bar that ends at `total`."""
    gpus = engine.gpus
    if gpus is None:
        gpus = (engine.tensor_parallel if engine.name == "vllm" else 1) if config.model.device != "cpu" else 0
    results = map_units(make, method, items, min(engine.workers, count), config.ray.address, gpus)
    yield from track(results, title, total, "shard", total - count)


def _drawn(run, folder: Path, everything: list[Unit], todo: list[int]) -> Callable[[int], tuple[list, list]]:
    """Let vLLM sample to disk for the units `todo`, before anything is scored: first all trajectories, then, with the target's
    memory freed, all super-trees. Returns a function that reads those of a unit."""
    stores = [TraceStore(folder / kind, kind) for kind in ("trajectories", "rollouts")]

    def read(i: int, kinds: int = 2) -> tuple:
        return tuple(store.lists(store.name(i, len(everything)))["tokens"] for store in stores[:kinds])

    for before, store in enumerate(stores):
        missing = [i for i in todo if not store.holds(store.name(i, len(everything)))]
        items = ((everything[i], *read(i, before)) for i in missing)
        if missing:
            for at, columns in run(store.kind, items, len(missing), store.kind, len(todo)):
                store.write(store.name(missing[at], len(everything)), columns)
    return read


def chosen_engine(config: Config, max_length: int) -> EngineConfig:
    """The engine that samples: the one asked for, or with "auto" vLLM where it is installed and the device is one GPU."""
    name = config.engine.name
    if name == "auto":
        alone = config.model.device != "cpu" and config.model.tensor_parallel == 1
        name = "vllm" if alone and importlib.util.find_spec("vllm") else "transformers"
    return replace(config.engine, name=name, max_length=max_length)


def verify(folder: Path) -> None:
    """Check the rows and the checksum of every shard. Raises UserError that names what is damaged."""
    store = TraceStore(folder)
    if not store.shards:
        raise UserError(f"{folder}: it holds no traces; run stage=traces first.")
    if faults := store.faults():
        broken = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        raise UserError(
            f"{folder}: {len(faults)} of {len(store.shards)} shards are broken: {broken}. Run stage=traces again: only these "
            "are made anew."
        )
    console.print(f"[green]✓[/] {folder}: {len(store.shards)} shards, {store.roots} roots, all intact")


STAGE = Stage("traces", "traces", lambda config: ("pair",), settings, work, lambda folder: not TraceStore(folder).faults())
