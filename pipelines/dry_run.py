"""dry_run=true: what a run would need and do, before anything is loaded.

Models are built without weights, on torch's meta device, from their config.json.
"""

import shutil
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


def without_weights(where: str, key: str, dtype: torch.dtype) -> Any:
    """Build the transformers model in a folder or on the hub, without a weight.

    Raises UserError, naming `key`, for one that is no causal LM or cannot take a tree.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        with torch.device("meta"):
            model = architecture(config)[0].from_config(config, dtype=dtype)
    except Exception as error:  # transformers raises whatever a wrong configuration leads to
        raise UserError(
            f"{key}={where}: no causal language model can be built of its configuration"
            f" ({first_line(error)}). Give a folder with config.json, or the name of a hub model"
            " where the hub can be reached."
        ) from error
    if reason := cannot_take_a_tree(model):
        raise UserError(f"{key}={where}: {reason}, so one pass cannot hold a tree.")
    return model


def pair_without_weights(config: Config) -> dict[str, Any]:
    """Build target and draft by role, those that would be trained here too."""
    from nde_talf.draft_training.train_lm import build_llama

    model, dtype = config.model, getattr(torch, config.model.dtype)
    if model.target:
        where = {"target": model.target, "draft": model.draft}
        return {
            role: without_weights(name, f"model.{role}", dtype)
            for role, name in where.items()
            if name
        }
    sizes = {"target": model.target_lm, "draft": model.draft_lm}
    with torch.device("meta"):
        return {role: build_llama(lm, model.vocab_size).to(dtype) for role, lm in sizes.items()}


def trace_sizes(traces: TracesConfig, models: dict[str, Any]) -> tuple[int, int]:
    """Return the largest number of roots, and their bytes on disk before compression.

    A root has hidden states, scalars and labels.
    """
    prompts = traces.train_prompts + traces.validation_prompts
    roots = prompts * len(traces.settings) * -(-traces.new_tokens // traces.stride)
    hidden = {role: model.get_output_embeddings().in_features for role, model in models.items()}
    samples = max(traces.samples, traces.validation_samples)
    numbers = len(SCALARS) + 3 + samples * len(traces.verifiers) * len(TREES)
    return roots, roots * (2 * (hidden["target"] + 2 * hidden["draft"]) + 4 * numbers)


def cache_bytes(model: Any) -> int:
    """Count the bytes of one token's keys and values in all layers."""
    config = model.config.get_text_config()
    heads, given = config.num_attention_heads, config.to_dict()
    size = given.get("head_dim") or config.hidden_size // heads
    keys = (given.get("num_key_value_heads") or heads) * size
    return 2 * config.num_hidden_layers * keys * model.dtype.itemsize


def dry_run(config: Config) -> None:
    """Print what a run needs and does."""
    models = pair_without_weights(config)
    table = Table("", "computed, not run", title=f"run={config.run}", title_justify="left")
    for role, model in models.items():
        count, name = model.num_parameters(), model.name_or_path or "trained here"
        weights = decimal(count * model.dtype.itemsize)
        table.add_row(f"{role}: {name}", f"{count:,} parameters, {weights}")
        table.add_row(f"{role}: 1,000 tokens of context", decimal(1000 * cache_bytes(model)))
    if "draft" in models:
        roots, size = trace_sizes(config.traces, models)
        table.add_row("traces on disk", f"{decimal(size)}, at most {roots:,} roots")
    folder = Path(config.paths.checkpoints).absolute()
    disk = next(path for path in (folder, *folder.parents) if path.exists())
    table.add_row(f"free in {disk}", decimal(shutil.disk_usage(disk).free))
    console.print(table)
