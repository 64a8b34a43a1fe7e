"""Stage traces: the target's trajectories, roots with features, and labels.

Labels come from super-trees (Eq. 3 of the NDE paper).
"""

import importlib.util
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size

from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.text.pair import Pair, check_prompts
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.data.traces.store import TraceStore
from nde_talf.data.traces.worker import Tracer, Unit, units
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.parallel import Workers
from nde_talf.decoding.common.progress import console, track
from nde_talf.pipelines.config.schema import Config, ModelConfig
from nde_talf.pipelines.runs.run_models import load_head_draft, needs
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.stage import Stage

SUPER_TREE_DEPTH = 17
"""Tokens after a root that a context has to have room for."""


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    traces = asdict(config.traces) | {"drafter": config.drafter}
    del traces["micro_batch"]  # it decides nothing of what is traced
    return {"traces": traces, "engine": {"name": config.engine.name}}


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Sample trajectories and write the traces; return the figures for the manifest."""
    traces, model, folder = config.traces, config.model, folders["traces"]
    prompts = _prompts(traces, Pair(folders["pair"]))
    longest = max(len(prompt.tokens) for prompt in prompts) + traces.new_tokens + SUPER_TREE_DEPTH
    engine = chosen_engine(config.engine, model)
    shards, stores = units(prompts, traces), {"traces": folder}
    if engine.name == "vllm":  # what it samples goes to disk before anything is scored
        stores = {"trajectories": folder / "trajectories", **stores}
    missing = {
        kind: _missing(TraceStore(where, kind), len(shards)) for kind, where in stores.items()
    }
    todo = missing["traces"]
    if len(todo) < len(shards):
        console.print(f"resuming: {len(shards) - len(todo)} of {len(shards)} shards are there")
    placed = model.device, traces.dtype, *model.placed[2:5]
    head: Any = None
    if config.drafter == "head":
        head = partial(load_head_draft, folders["draft"] / "export")
    how = placed, engine, longest, model.threads, head
    make = partial(Tracer, folders["pair"], stores, traces, *how)
    if todo:
        count = min(engine.workers, len(todo))
        with Workers(make, count, config.ray.address, engine.gpus or 0) as pool:
            # A worker looks at the models, so that this process holds no memory of a device.
            asked = prompts, len(todo) / len(shards), folder
            ((_, said),) = pool.map(_check_needs, [asked], 1)  # one task, one answer
            console.print(f"{engine.name}: {said}")
            _write(pool, shards, missing, stores)
    store = _finished(stores["traces"])
    metrics = {"roots": store.roots, "shards": len(shards)}
    console.print(f"{store.roots} roots in {len(shards)} shards: {store.folder}/*.parquet")
    return metrics


def _prompts(traces: TracesConfig, pair: Pair) -> list[Prompt]:
    """Return the prompts to trace, the first of which are to train on."""
    train, validation = traces.train_prompts, traces.validation_prompts
    key = "traces.train_prompts + traces.validation_prompts"
    prompts = pair.prompts("trace", train + validation, key)
    return [
        replace(prompt, split="train" if i < train else "validation")
        for i, prompt in enumerate(prompts)
    ]


def _finished(folder: Path) -> TraceStore:
    """Return the store of the traces.

    Raises UserError if some of the shards that workers wrote are not seen here, or where no
    text is long enough to hold a root.
    """
    store = TraceStore(folder)
    files = [name for name, entry in store.shards.items() if entry["rows"]]
    if lost := [name for name in files if not (store.folder / name).exists()]:
        raise UserError(
            f"{store.folder}: workers wrote {len(lost)} shards that this process does not see, such"
            f" as {lost[0]}. All machines have to share that folder: set paths.checkpoints to a"
            " shared file system."
        )
    if not store.roots:
        raise UserError(
            "the target ended its text at once after every prompt: there is no root to trace. Are"
            " these prompts complete texts already?"
        )
    return store


def _write(
    pool: Workers, work: list[Unit], missing: dict[str, list[int]], stores: dict[str, Path]
) -> None:
    """Let the workers write the missing shards of each kind that traces are made from."""
    todo = missing["traces"]
    for kind, shards in missing.items():
        needed = [i for i in shards if i in todo]
        items = ((kind, work[i], i, len(work)) for i in needed)
        written, store = pool.map(Tracer.write, items, len(needed)), TraceStore(stores[kind], kind)
        for _, shard in track(written, kind, len(todo), "shard", len(todo) - len(needed)):
            store.enter(*shard)


def _missing(store: TraceStore, count: int) -> list[int]:
    """The shards that have to be made, with a notice of each that is damaged."""
    faults = store.faults()
    for name, fault in faults.items():
        console.print(f"↻ {name}: {fault}; it is made again")
    return [
        i
        for i in range(count)
        if (name := store.name(i, count)) not in store.shards or name in faults
    ]


def _check_needs(tracer: Tracer, prompts: list[Prompt], left: float, folder: Path) -> str:
    """Check that prompts fit the models, and shards the disk of `folder`; say what is needed.

    left: fraction of the shards that are missing.
    """
    models: Any = tracer.models
    (target, draft), config = models, tracer.config
    new_tokens = config.new_tokens + SUPER_TREE_DEPTH
    check_prompts(prompts, new_tokens, target, draft)
    roots = round(left * (config.roots("train") + config.roots("validation")))
    most = int(left * config.space(target.hidden_size, draft.hidden_size))
    if most > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"{folder}: the traces need about {size(most)} and its disk has {size(free)} left. Free"
            " some space, set paths.checkpoints to another disk, or ask for less"
            " (traces.train_prompts, traces.settings, traces.stride, traces.samples,"
            " traces.verifiers)."
        )
    return f"up to {roots:,} roots, about {size(most)} of disk"


def chosen_engine(asked: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the engine that samples, with the GPUs of each Ray actor.

    It is the one asked for; with "auto" it is vLLM where that is installed and the device is the
    first GPU, which vLLM takes.
    """
    name, on_gpu = asked.name, model.device != "cpu"
    first = model.device in ("cuda", "cuda:0")
    if name == "auto":
        one = first and model.device_map is None
        name = "vllm" if one and importlib.util.find_spec("vllm") else "transformers"
    if name == "vllm" and on_gpu and not first:
        raise UserError(
            f"engine.name=vllm with model.device={model.device}: vLLM takes the first GPUs that it"
            " sees. Choose with CUDA_VISIBLE_DEVICES, and set model.device=cuda."
        )
    shared = asked.tensor_parallel if name == "vllm" else 1
    gpus = shared * on_gpu if asked.gpus is None else asked.gpus
    return replace(asked, name=name, gpus=gpus)


STAGE = Stage(
    "traces", "traces", needs, settings, work, lambda folder: not TraceStore(folder).faults()
)
