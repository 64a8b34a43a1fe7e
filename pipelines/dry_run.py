"""dry_run=true: what a run would need, before anything is loaded.

Models are built without weights, on torch's meta device.

`nde_talf.pipelines.costs` has the arithmetic. The configuration of a hub model comes from
configs/model/published, so that no network is needed for the presets; of other hub models, from the
hub.
"""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.units import duration, size
from nde_talf.decoding.loading import architecture, first_line
from nde_talf.decoding.model import cannot_take_a_tree
from nde_talf.pipelines import costs
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.costs import ModelSizes

PUBLISHED = Path(__file__).resolve().parents[1] / "configs" / "model" / "published"
NOTE = (
    f"Computed, not run. Passes by a roofline ({costs.EFFICIENCY:.0%} of the bandwidth, half of it"
    f" of the compute, {1e6 * costs.LAUNCH:.0f} µs a layer), without communication between GPUs;"
    " every trajectory at full length. GPUs: the smallest number that divides the target's heads"
    f" and holds every stage in {costs.USABLE:.0%} of their memory."
)


def model_config(where: str, key: str) -> Any:
    """Transformers' configuration of a model: of a folder, of configs/model/published, or of the
    hub.

    Raises:
        UserError: there is none. key: that named the model.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    published = PUBLISHED / f"{where.replace('/', '--')}.json"
    try:
        if published.is_file() and not Path(where).is_dir():
            return AutoConfig.for_model(**json.loads(published.read_text()))
        return AutoConfig.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise UserError(
            f"{key}={where}: its configuration could not be read ({first_line(error)}). Give a"
            " folder with config.json, or the name of a hub model where the hub can be reached."
        ) from error


def sizes(config: Any, dtype: str, name: str) -> ModelSizes:
    """The sizes of the model that a configuration describes, which is built on the meta device: it
    takes no memory.

    Raises UserError for a model that is no causal LM or cannot take a tree.
    """
    try:
        with torch.device("meta"):
            model = architecture(config)[0].from_config(config, dtype=getattr(torch, dtype))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise UserError(
            f"{name}: no causal language model can be built of its configuration"
            f" ({first_line(error)})."
        ) from error
    if reason := cannot_take_a_tree(model):
        raise UserError(f"{name}: {reason}, so one pass cannot hold a tree. Choose another model.")
    return replace(found := sizes_of(model, name), stored=stored_bytes(config, model, found))


def stored_bytes(config: Any, model: nn.Module, found: ModelSizes) -> float | None:
    """Bytes of a quantised model's weights: its files', or by the bits that its configuration names
    and a scale of two bytes for a group of numbers.

    The matrices of its layers are quantised, embeddings and output layer are not. None: it is not
    quantised, or not in a way that is known.
    """
    quantised = getattr(config, "quantization_config", None)
    if not quantised:
        return None
    if files := [
        file for file in Path(found.name).glob("*.safetensors") if Path(found.name).is_dir()
    ]:
        return sum(file.stat().st_size for file in files)
    said = quantised if isinstance(quantised, dict) else quantised.to_dict()
    bits = (
        said.get("bits")
        or 4 * said.get("load_in_4bit", False)
        or 8 * ("fp8" in str(said.get("quant_method")))
    )
    bits = bits or 8 * said.get("load_in_8bit", False)
    inside = {
        id(module.weight)
        for block in model.modules()
        if isinstance(block, nn.ModuleList)
        for module in block.modules()
        if isinstance(module, nn.Linear)
    }
    matrices = sum(weight.numel() for weight in model.parameters() if id(weight) in inside)
    others = found.divided + found.replicated - matrices
    return (
        matrices * (bits / 8 + 2 / (said.get("group_size") or 128)) + others * found.dtype.itemsize
        if bits
        else None
    )


def sizes_of(model: Any, name: str) -> ModelSizes:
    """The sizes of a transformers model.

    Tensor parallelism divides what the model's own plan names in its layers; embeddings and output
    layer are on every GPU.
    """
    plan = [
        pattern
        for pattern, how in (model.tp_plan or {}).items()
        if ".layers." in pattern and "replicated" not in how
    ]
    divided = replicated = 0
    for weight_name, weight in model.named_parameters():
        inside = any(fnmatchcase(weight_name.rpartition(".")[0], pattern) for pattern in plan)
        divided, replicated = (
            divided + inside * weight.numel(),
            replicated + (not inside) * weight.numel(),
        )
    text, output = model.config.get_text_config(), model.get_output_embeddings().weight
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers
    ]
    layer = sum(weight.numel() for weight in layers[0][-1].parameters())
    return ModelSizes(
        name, text, output.shape[1], output.shape[0], output.dtype, divided, replicated, layer
    )


def pair_sizes(config: Config) -> tuple[ModelSizes, ModelSizes | None]:
    """Sizes of target and draft, those that would be trained here too."""
    model, found = config.model, []
    for role in ("target", "draft"):
        if where := getattr(model, role):
            found.append(sizes(model_config(where, f"model.{role}"), model.dtype, where))
        elif not model.target:
            from nde_talf.draft_training.train_lm import build_llama

            with torch.device("meta"):
                made = build_llama(getattr(model, f"{role}_lm"), model.vocab_size)
            found.append(sizes_of(made.to(getattr(torch, model.dtype)), f"{role}, trained here"))
        else:
            found.append(None)
    return found[0], found[1]


def rows(config: Config, target: ModelSizes, draft: ModelSizes | None) -> list[tuple[str, str]]:
    """What a run needs, line by line."""
    ranks = 1
    divided = f" on each of {ranks} GPUs" if ranks > 1 else ""
    context = costs.longest_text(config)
    lines = [("weights of the target", f"{size(target.weights(ranks))}{divided}  ({target.name})")]
    if draft:
        lines.append(("weights of the draft", f"{size(draft.weights())}  ({draft.name})"))
    for role, model, by in (("target", target, ranks), ("draft", draft, 1)):
        if model:
            lines.append(
                (
                    f"KV cache of the {role}",
                    f"{size(costs.cache_bytes(model, by) * context)} at {context:,} tokens",
                )
            )
    lines.append(("largest [N, V]", f"{size(costs.largest_rows(config, target))} in float32"))
    for stage, peak in costs.stage_memory(config, target, draft, ranks).items():
        lines.append((f"peak memory, {stage}", f"{size(peak)}{divided}"))
    if draft:
        found, disk = costs.roots(config.traces), costs.trace_bytes(config.traces, target, draft)
        lines.append(
            (
                "disk of the traces",
                f"{size(disk)}: {sum(found.values()):,} roots, before compression",
            )
        )
        states = 2 * (target.hidden_size + 2 * draft.hidden_size) * sum(found.values())
        lines.append(("disk of stage selector", f"{size(states)} more while it runs"))
    for name, (*_, memory) in costs.GPUS.items():
        count = costs.gpus_needed(config, target, draft, memory)
        if count is None:
            lines.append(
                (
                    f"{name}, {memory / 1e9:.0f} GB",
                    "does not fit: more than 16, or the target cannot be divided",
                )
            )
            continue
        spent = ""
        if draft:
            total = sum(
                costs.trace_seconds(config, target, draft, costs.gpus(name, count)).values()
            )
            spent = f"; traces: {duration(total)}, {count * total / 3600:,.1f} GPU hours"
        lines.append(
            (f"{name}, {memory / 1e9:.0f} GB", f"{count} GPU{'s' * (count > 1)} needed{spent}")
        )
    return lines


def dry_run(config: Config) -> None:
    """Print what a run needs."""
    table = Table("", "computed, not run", title=f"run={config.run}", title_justify="left")
    for line in rows(config, *pair_sizes(config)):
        table.add_row(*line)
    console.print(table)
    console.print(NOTE, style="dim")
