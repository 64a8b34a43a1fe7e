"""dry_run=true: what a run would need and do, before anything is loaded.

Models are built without weights, on torch's meta device, from their config.json.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from rich.table import Table

from nde_talf.data.traces.settings import TracesConfig
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.features import SCALARS
from nde_talf.decoding.fitness import cannot_take_a_tree, first_line
from nde_talf.decoding.loading import architecture
from nde_talf.pipelines.config import Config


@dataclass(frozen=True)
class ModelSizes:
    """A model that is known by its configuration. config: of its text model."""

    name: str
    config: Any
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    parameters: int


def sizes(where: str, key: str, dtype: str) -> ModelSizes:
    """Return the sizes of the model in a folder or on the hub, without loading a weight.

    Raises UserError, naming `key`, for one that is no causal LM or cannot take a tree.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        with torch.device("meta"):
            model = architecture(config)[0].from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # transformers raises whatever a wrong configuration leads to
        raise UserError(
            f"{key}={where}: no causal language model can be built of its configuration"
            f" ({first_line(error)}). Give a folder with config.json, or the name of a hub model"
            " where the hub can be reached."
        ) from error
    if reason := cannot_take_a_tree(model):
        raise UserError(f"{key}={where}: {reason}, so one pass cannot hold a tree.")
    return sizes_of(model, where)


def sizes_of(model: Any, name: str) -> ModelSizes:
    """Return the sizes of a transformers model, which may be on the meta device."""
    output = model.get_output_embeddings().weight
    count = sum(weight.numel() for weight in model.parameters())
    return ModelSizes(
        name, model.config.get_text_config(), output.shape[1], output.shape[0], output.dtype, count
    )


def pair_sizes(config: Config) -> dict[str, ModelSizes]:
    """Return the sizes of target and draft by role, those that would be trained here too."""
    from nde_talf.draft_training.train_lm import build_llama

    model = config.model
    if model.target:
        where = {"target": model.target, "draft": model.draft}
        return {
            role: sizes(name, f"model.{role}", model.dtype) for role, name in where.items() if name
        }
    with torch.device("meta"):
        made = {
            "target": build_llama(model.target_lm, model.vocab_size),
            "draft": build_llama(model.draft_lm, model.vocab_size),
        }
    dtype = getattr(torch, model.dtype)
    return {role: sizes_of(one.to(dtype), "trained here") for role, one in made.items()}


def root_count(traces: TracesConfig) -> int:
    """Return the largest number of roots that the traces can have."""
    prompts = traces.train_prompts + traces.validation_prompts
    return prompts * len(traces.settings) * -(-traces.new_tokens // traces.stride)


def trace_bytes(traces: TracesConfig, models: dict[str, ModelSizes]) -> int:
    """Return the bytes of hidden states, scalars and labels on disk, before compression."""
    states = models["target"].hidden_size + 2 * models["draft"].hidden_size
    samples = max(traces.samples, traces.validation_samples)
    labels = samples * len(traces.verifiers) * len(TREES)
    return root_count(traces) * (2 * states + 4 * (len(SCALARS) + 3 + labels))


def cache_bytes(model: ModelSizes) -> int:
    """Count the bytes of one token's keys and values in all layers."""
    config, heads = model.config, model.config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * size
    return 2 * config.num_hidden_layers * keys * model.dtype.itemsize


def dry_run(config: Config) -> None:
    """Print what a run needs and does."""
    models = pair_sizes(config)
    table = Table("", "computed, not run", title=f"run={config.run}", title_justify="left")
    for role, model in models.items():
        weights = decimal(model.parameters * model.dtype.itemsize)
        table.add_row(f"{role}: {model.name}", f"{model.parameters:,} parameters, {weights}")
        table.add_row(f"{role}: 1,000 tokens of context", decimal(1000 * cache_bytes(model)))
    if "draft" in models:
        roots = f"at most {root_count(config.traces):,} roots"
        table.add_row("traces on disk", f"{decimal(trace_bytes(config.traces, models))}, {roots}")
    folder = Path(config.paths.checkpoints).absolute()
    disk = next(path for path in (folder, *folder.parents) if path.exists())
    table.add_row(f"free in {disk}", decimal(shutil.disk_usage(disk).free))
    console.print(table)
