"""Memory that tracing takes, from the models' sizes."""

from typing import Any, Protocol

import torch

from nde_talf.data.traces.label_chunks import MATRICES, chunk_rows, rows_together
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.decoding.super_tree import super_tree_layout


class Sizes(Protocol):
    """Sizes that memory depends on, of a `CausalModel` or of a configuration alone."""

    config: Any
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype


def cache_bytes(model: Sizes, ranks: int = 1) -> float:
    """Count the bytes of one token's keys and values in all layers, on one of `ranks` GPUs."""
    config, heads = model.config, model.config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * size
    return 2 * config.num_hidden_layers * keys * model.dtype.itemsize / ranks


def peak_memory(
    target: Sizes, draft: Sizes, config: TracesConfig, longest: int, ranks: int = 1
) -> float:
    """Count the peak of memory while tracing, in bytes beside the models' weights.

    The hidden states of a micro-batch stay throughout. Added to them is the larger of a pass
    (`pass_memory`) and a chunk of distributions.

    Args:
        target: its sizes.
        draft: its sizes.
        config: of the traces.
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
    """Count the rows of [V] numbers that are held at once while tracing."""
    layout = super_tree_layout()
    labelled = config.micro_batch * (layout.l1 + 1) * rows_together(layout)
    return min(chunk_rows(vocabulary, config.node_chunk, layout), labelled)


def pass_memory(model: Sizes, batch: int, context: int, rows: int, ranks: int = 1) -> float:
    """Count the bytes of a pass beside the weights.

    It is over `rows` new tokens of each of `batch` sequences after the same `context` cached ones:
    the context's cache and its copies, which grow by a half when they are full, the mask and the
    activations.
    """
    length = context + rows
    slots = context + batch * max(length, 1.5 * context)
    inner = getattr(model.config, "intermediate_size", None) or 4 * model.config.hidden_size
    numbers = batch * rows * (length + 8 * model.config.hidden_size + 3 * inner / ranks)
    return cache_bytes(model, ranks) * slots + numbers * model.dtype.itemsize
