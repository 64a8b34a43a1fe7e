"""What a run needs, by arithmetic alone: bytes on a GPU, bytes on disk, and time by a roofline.

Nothing is loaded or measured.

A pass over n tokens at a context of c takes max(weights / bandwidth, 2 parameters n / compute) + c
x KV bytes / bandwidth + layers x launch time: what a transformers model in eager mode is bound by.
With several GPUs, bandwidth and compute are those of all together, and what they say to each other
costs nothing: a lower bound. Memory of stage traces is `nde_talf.data.traces.budget.peak_memory`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nde_talf.data.traces.budget import cache_bytes, pass_memory, peak_memory, trace_chunk
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.decoding.actions import K_MAX, L1_MAX, L2_MAX, TREES
from nde_talf.decoding.features import SCALARS
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.draft_training.settings import HeadConfig
from nde_talf.pipelines.config import Config

LAUNCH = 150e-6
"""Seconds a layer, in eager mode."""
EFFICIENCY = 0.75
"""Of the peak bandwidth; half of it for compute."""
USABLE = 0.92
"""Fraction of a GPU's memory that tensors may take; the rest is the driver's and the allocator's.
"""
ROW_PASSES = 10
"""How often warping, and the labels of each rule, read or write a next-token distribution."""
HEAD_MATRICES = 3
"""Rows of [V] in float32 that a loss holds at its peak: labels, logits and a product."""
QUERIES, SCORES = 4096, 2**28
"""Nodes of a row whose scores over the text a head computes together, on a GPU."""
ENGINE_BATCH = 128
"""Sequences that vLLM samples at once; the torch engine samples those of a shard."""


@dataclass(frozen=True)
class Machine:
    """`count` GPUs of one kind.

    Bandwidth in bytes/s and compute in bf16 flop/s are those of all together.
    """

    kind: str
    count: int
    bandwidth: float
    compute: float

    @property
    def name(self) -> str:
        return f"{self.count} x {self.kind}"


GPUS = {
    "A100": (1.94e12, 312e12, 80e9),
    "H100": (3.35e12, 989e12, 80e9),
    "H200": (4.8e12, 989e12, 141e9),
}
"""Bandwidth, compute and memory of one GPU."""


def gpus(kind: str, count: int) -> Machine:
    """`count` GPUs of a kind."""
    bandwidth, compute, _ = GPUS[kind]
    return Machine(kind, count, count * bandwidth, count * compute)


@dataclass(frozen=True)
class Model:
    """The parameters that a pass reads, and the bytes of a token of context."""

    name: str
    parameters: float
    layers: int
    kv_bytes: float


def seconds(model: Model, machine: Machine, context: int, tokens: int, sequences: int = 1) -> float:
    """A pass over `tokens` of each of so many sequences: weights are read once, keys and values for
    every sequence.
    """
    tokens, context = tokens * sequences, context * sequences
    bandwidth, compute = EFFICIENCY * machine.bandwidth, 0.5 * EFFICIENCY * machine.compute
    weights = max(2 * model.parameters / bandwidth, 2 * model.parameters * tokens / compute)
    return weights + context * model.kv_bytes / bandwidth + model.layers * LAUNCH


@dataclass(frozen=True)
class ModelSizes:
    """A model that is known by its configuration.

    Attributes:
        config: transformers' configuration of its text model.
        hidden_size, vocab_size: columns and rows of its output layer.
        divided: parameters that tensor parallelism divides among GPUs: those of attention and MLP.
        replicated: those that every GPU holds: embeddings, output layer and norms.
        layer: parameters of one decoder layer.
        stored: bytes of a quantised model's weights; None: they are of `dtype`.
    """

    name: str
    config: Any
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    divided: int
    replicated: int
    layer: int
    stored: float | None = None

    def weights(self, ranks: int = 1) -> float:
        """Bytes of the weights on one of `ranks` GPUs. Quantised ones are not divided."""
        if self.stored is not None:
            return self.stored
        return (self.divided / ranks + self.replicated) * self.dtype.itemsize

    def divides(self, ranks: int) -> bool:
        """Whether the model can be divided among `ranks` GPUs: they divide its attention heads and
        its MLP.
        """
        counts = [
            getattr(self.config, f"num_{kind}_heads", None) or ranks
            for kind in ("attention", "key_value")
        ]
        counts.append(getattr(self.config, "intermediate_size", None) or ranks)
        return ranks == 1 or bool(
            self.divided and self.stored is None and not any(count % ranks for count in counts)
        )

    @property
    def roofline(self) -> Model:
        """As `seconds` takes it."""
        return Model(
            self.name,
            self.divided + self.replicated,
            self.config.num_hidden_layers,
            cache_bytes(self),
        )


def longest_text(config: Config) -> int:
    """Tokens of the longest prompt, its new tokens and a super-tree: the context that the caches
    hold.
    """
    sets = [own.cut or own.max_tokens for own in config.data.sets.values()] or [
        config.data.prompt_tokens[1]
    ]
    return (
        max(sets)
        + max(config.traces.new_tokens, config.evaluation.new_tokens)
        + 1
        + L1_MAX
        + L2_MAX
    )


def roots(traces: TracesConfig) -> dict[str, int]:
    """Maximum number of roots of the splits."""
    each = len(traces.settings) * -(-traces.new_tokens // traces.stride)
    return {"train": traces.train_prompts * each, "validation": traces.validation_prompts * each}


def super_trees(traces: TracesConfig) -> int:
    """Super-trees of all roots; with draft_temperature=raw all settings share them."""
    found = roots(traces)
    trees = found["train"] * traces.samples + found["validation"] * (
        traces.validation_samples or traces.samples
    )
    return trees // (len(traces.settings) if traces.draft_temperature == "raw" else 1)


def trace_bytes(traces: TracesConfig, target: ModelSizes, draft: ModelSizes) -> float:
    """Bytes of hidden states (half precision), scalars and labels (float32) on disk, not
    compressed.
    """
    found, labels = roots(traces), len(traces.verifiers) * len(TREES)
    samples = {"train": traces.samples, "validation": traces.validation_samples or traces.samples}
    states, scalars = target.hidden_size + 2 * draft.hidden_size, len(SCALARS) + 3
    return sum(
        count * (2 * states + 4 * (scalars + samples[split] * labels))
        for split, count in found.items()
    )


def trace_seconds(
    config: Config, target: ModelSizes, draft: ModelSizes, machine: Machine
) -> dict[str, float]:
    """Seconds of stage traces by part: sampling the trajectories, running both models over
    trajectories and super-trees, and computing distributions and labels.
    """
    traces, layout, context = config.traces, super_tree_layout(), longest_text(config)
    trajectories = (traces.train_prompts + traces.validation_prompts) * (
        1 if traces.draft_temperature == "raw" else len(traces.settings)
    )
    trees, batch, of = super_trees(traces), traces.micro_batch, partial(seconds, machine=machine)
    p, q = target.roofline, draft.roofline
    sequences = min(
        ENGINE_BATCH if config.engine.name == "vllm" else traces.shard_prompts, trajectories
    )
    steps = trajectories / sequences * traces.new_tokens
    levels = [1] * (layout.l1 + 1) + [(layout.l1 + 1) * layout.k] * (layout.l2 - 1)
    rows = trees * layout.inner * (len(traces.settings) if traces.draft_temperature == "raw" else 1)
    moved = rows * target.vocab_size * 4 * ROW_PASSES * (2 + len(traces.verifiers))
    return {
        "trajectories": steps * of(p, context=context, tokens=1, sequences=sequences),
        "trajectories once more": (
            trajectories * sum(of(each, context=0, tokens=context) for each in (p, q))
        ),
        "super-trees, target": (
            trees / batch * of(p, context=context, tokens=layout.inner, sequences=batch)
        ),
        "super-trees, draft": (
            trees / batch * sum(of(q, context=context, tokens=n, sequences=batch) for n in levels)
        ),
        "distributions and labels": (
            moved * machine.count / (EFFICIENCY * machine.bandwidth)
        ),  # on the first GPU
    }


def head_parameters(target: ModelSizes, draft: HeadConfig) -> int:
    """Of a head: a decoder layer, the matrix that joins embedding and feature, and with
    features=three an output layer.
    """
    width = target.hidden_size
    if draft.features == "final":
        return target.layer + 2 * width**2
    return target.layer + 3 * width**2 + (draft.draft_vocab or target.vocab_size) * width


def row_length(config: Config) -> int:
    """Tokens of a row that a head is trained on."""
    return config.dialogues.length if config.dialogues.source else config.model.length


def head_memory(config: Config, target: ModelSizes, ranks: int = 1) -> float:
    """Peak bytes while a head is trained in float32 under autocast to half precision, beside the
    target's weights.

    A step has its peak in one of three places. As the backward pass begins there are 14 bytes a
    parameter (weight and two moments in float32, a copy in half precision), what that pass needs,
    and rows of [V] in the loss or the gradients of scores over the text. In the optimiser there are
    20 bytes a parameter. In the target's pass there are its cache and activations.

    The nodes of a row are its tokens, and k at each depth of the trees after its roots. The
    backward pass needs, in bytes: 20 H (of a token) or 14 H (of a node of a tree) and 8 for each
    number inside the MLP; 15 H for a node and each of the nodes above it and itself, whose keys and
    values are repeated for all heads; and 6.5 for each score of a node and a head over the text.

    Where one depth has more scores than `tree_attention.SCORES`, attention goes in parts and is
    computed again in the backward pass, as is the MLP after it. Then neither scores nor the MLP's
    numbers are held, and the backward pass needs 10 bytes for each score of one part, and 7 for
    each number inside the MLP at the nodes of one depth.

    These numbers were fitted to torch's memory tracker.
    """
    draft, length, loss, own = config.draft, row_length(config), config.draft.loss, target.config
    width, inner = own.hidden_size, getattr(own, "intermediate_size", None) or 4 * own.hidden_size
    level = min(draft.roots or length, length) * (loss.k if loss.target_trees else 1)
    parts = -(
        -level // QUERIES
    )  # the roots of the first one see a part of the text, those of the last one all of it
    nodes, slots = level * (loss.depth - 1), level * loss.depth * (loss.depth - 1) // 2
    states = (
        length * (20 * width + 8 * inner) + nodes * (14 * width + 8 * inner) + slots * 15 * width
    )
    scores = 6.5 * own.num_attention_heads * nodes * length * (parts + 1) / (2 * parts)
    gradients = 4 * own.num_attention_heads * min(nodes, QUERIES) * length
    rows = 4 * draft.nodes_in_pass * target.vocab_size * 4 * HEAD_MATRICES
    passed = pass_memory(target, draft.batch, length, draft.nodes_in_pass, ranks)
    count = head_parameters(target, draft)
    backward = 14 * count + draft.batch * (states + scores) + max(rows, draft.batch * gradients)
    if loss.depth > 1 and draft.batch * own.num_attention_heads * level * length > SCORES:
        held = draft.batch * (states - nodes * 8 * inner)
        backward = 14 * count + held + max(rows, 10 * SCORES + 7 * draft.batch * level * inner)
    return max(backward, 20 * count, 12 * count + passed)


def decode_memory(
    config: Config, target: ModelSizes, draft: ModelSizes | None, ranks: int = 1
) -> float:
    """Peak bytes while decoding, beside the weights: the caches and the distributions of one tree,
    or the prefill.
    """
    context, nodes = longest_text(config), 1 + L1_MAX + K_MAX * L2_MAX
    models = [(target, ranks), *([(draft, 1)] if draft else [])]
    caches = sum(pass_memory(model, 1, context, nodes, by) for model, by in models)
    return caches + max(nodes * 4 * 4, 2 * 2) * target.vocab_size


def stage_memory(
    config: Config, target: ModelSizes, draft: ModelSizes | None, ranks: int = 1
) -> dict[str, float]:
    """Peak bytes by stage on the first of `ranks` GPUs that share the target, weights too.

    The draft is on the first alone.
    """
    context, beside = longest_text(config), draft
    found = {
        "latency, evaluate": (
            target.weights(ranks)
            + (beside.weights() if beside else 0)
            + decode_memory(config, target, beside, ranks)
        )
    }
    if draft:
        p, q = (
            replace(model, dtype=getattr(torch, config.traces.dtype)) for model in (target, draft)
        )
        found["traces"] = (
            p.weights(ranks) + q.weights() + peak_memory(p, q, config.traces, context, ranks)
        )
    found["draft"] = target.weights(ranks) + head_memory(config, target, ranks)
    return found


def gpus_needed(
    config: Config, target: ModelSizes, draft: ModelSizes | None, memory: float
) -> int | None:
    """The smallest number of GPUs of so many bytes on which every stage fits; None if there is none
    up to 16.
    """
    for ranks in filter(target.divides, (1, 2, 4, 8, 16)):
        if max(stage_memory(config, target, draft, ranks).values()) <= USABLE * memory:
            return ranks
    return None


def largest_rows(config: Config, target: ModelSizes) -> float:
    """Bytes of the largest [N, V] matrix of float32 that any stage holds."""
    nodes = max(trace_chunk(target.vocab_size, config.traces), 4 * config.draft.nodes_in_pass)
    return nodes * target.vocab_size * 4
