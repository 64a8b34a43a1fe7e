"""What stage traces will need, reported before it starts: time and disk from a dry run, memory from
the models' sizes.
"""

import io
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
import torch

from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.traces.label_chunks import MATRICES, chunk_rows, rows_together
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.store import arrow_table
from nde_talf.data.traces.worker import Tracer, Unit
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.units import duration, size
from nde_talf.decoding.super_tree import super_tree_layout

DRY_ROOTS = 3


class Sizes(Protocol):
    """What memory depends on: of a loaded `CausalModel`, or of a model that is known by its
    configuration alone.
    """

    config: Any
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Budget:
    """What the traces that are still to be made need.

    Attributes:
        rows: maximum number of roots.
        seconds: of work, on all workers together.
        disk: bytes of the Parquet shards.
        memory: bytes beside the models' weights.
    """

    rows: int
    seconds: float
    disk: float
    memory: float

    def __str__(self) -> str:
        return (
            f"up to {self.rows:,} roots, about {duration(self.seconds)}, {size(self.disk)} of disk,"
            f" {size(self.memory)} of memory beside the models"
        )


def predicted(tracer: Tracer, work: list[Unit], workers: int = 1, ranks: int = 1) -> Budget:
    """Predict a budget from a dry run on the first unit: generate text for three roots after each
    of its prompts, and trace it after the first prompt.

    The run is made twice, and the second is timed. ranks: GPUs that share the target.
    """
    config, first = tracer.config, work[0]
    one = replace(first, prompts=first.prompts[:1], sampled=first.sampled[:1])
    prompts, engine = [p.tokens for p in first.prompts], TransformersEngine(tracer.models[0])
    for _ in range(2):
        started = time.perf_counter()
        continued = engine.rollouts(
            prompts, SETTINGS[first.sampled[0]], DRY_ROOTS * config.stride, 1, first.seed
        )
        sampled = time.perf_counter()
        table = arrow_table(tracer.trace(one, [[*prompts[0], *continued[0, 0].tolist()]]))
        seconds = (sampled - started) / len(prompts) + time.perf_counter() - sampled
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    roots = -(-config.new_tokens // config.stride)
    rows = sum(len(u.prompts) * len(u.settings) for u in work) * roots
    trees = sum(len(u.prompts) * len(u.settings) * u.samples for u in work) * roots
    longest = max(len(p.tokens) for u in work for p in u.prompts) + config.new_tokens
    scale = trees / (table.num_rows * one.samples)
    return Budget(
        rows,
        seconds * scale / workers,
        file.tell() * scale,
        peak_memory(*tracer.models, config, longest, ranks),
    )


def cache_bytes(model: Sizes, ranks: int = 1) -> float:
    """Bytes of one token's keys and values in all layers, on one of `ranks` GPUs that share the
    model.
    """
    own, heads = model.config, model.config.num_attention_heads
    size = getattr(own, "head_dim", None) or own.hidden_size // heads
    keys = (getattr(own, "num_key_value_heads", None) or heads) * size
    return 2 * own.num_hidden_layers * keys * model.dtype.itemsize / ranks


def peak_memory(
    target: Sizes, draft: Sizes, config: TracesConfig, longest: int, ranks: int = 1
) -> float:
    """The peak of memory while tracing, in bytes beside the models' weights.

    The hidden states of a micro-batch stay throughout. Added to them is the larger of a pass
    (`pass_memory`) and a chunk of distributions.

    Args:
        longest: tokens of the longest trajectory.
        ranks: GPUs that share the target; the draft is on one of them, whose memory this is.
    """
    layout = super_tree_layout()
    rows = config.micro_batch * layout.inner
    chunk = trace_chunk(target.vocab_size, config)
    passes = [
        pass_memory(model, config.micro_batch, longest, layout.inner, by)
        for model, by in ((target, ranks), (draft, 1))
    ]
    states = rows * (
        target.hidden_size * target.dtype.itemsize + draft.hidden_size * draft.dtype.itemsize
    )
    return states + max(*passes, chunk * target.vocab_size * 4 * MATRICES)


def trace_chunk(vocabulary: int, config: TracesConfig) -> int:
    """Rows of [V] numbers that are held at once while tracing."""
    layout = super_tree_layout()
    labelled = config.micro_batch * (layout.l1 + 1) * rows_together(layout)
    return min(chunk_rows(vocabulary, config.node_chunk, layout), labelled)


def pass_memory(model: Sizes, batch: int, context: int, rows: int, ranks: int = 1) -> float:
    """Bytes of a pass over `rows` new tokens of each of `batch` sequences after the same `context`
    cached ones, beside the weights: the context's cache and its copies, which grow by a half when
    they are full, the mask and the activations.
    """
    length = context + rows
    slots = context + batch * max(length, 1.5 * context)
    inner = getattr(model.config, "intermediate_size", None) or 4 * model.config.hidden_size
    numbers = batch * rows * (length + 8 * model.config.hidden_size + 3 * inner / ranks)
    return cache_bytes(model, ranks) * slots + numbers * model.dtype.itemsize


def check_disk(folder: Path, budget: Budget) -> None:
    """Raise UserError, with the numbers, when the disk of `folder` can't hold the traces."""
    free = shutil.disk_usage(folder).free
    if budget.disk > free:
        raise UserError(
            f"{folder}: the traces need about {size(budget.disk)} and its disk has {size(free)}"
            " left. Free some space, set paths.checkpoints to another disk, or ask for less"
            " (traces.train_prompts, traces.settings, traces.stride, traces.samples,"
            " traces.verifiers)."
        )
