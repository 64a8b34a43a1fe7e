"""dry_run=true: what a run would need and do, before anything is loaded.

Models are built without weights, on torch's meta device, from their config.json.
"""

import importlib.util
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from rich.table import Table

from nde_talf.data.text.settings import BUILT_IN
from nde_talf.data.text.shipped import is_shipped
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.features import SCALARS
from nde_talf.decoding.fitness import longest_context
from nde_talf.decoding.loading import architecture, read_config
from nde_talf.draft_training.families import family_named, not_for_vllm
from nde_talf.pipelines.checks import check_config, faults_of, sources
from nde_talf.pipelines.config import OF_DRAFT_MODEL, Config, ModelConfig
from nde_talf.pipelines.manifest import MANIFEST, plain, read_manifest
from nde_talf.pipelines.stage import Stage, changed, every_stage, locate, told


def without_weights(where: str, key: str, dtype: torch.dtype) -> Any:
    """Build the transformers model in a folder or on the hub, without a weight.

    Raises UserError, naming `key`, for one that is no causal LM or cannot take a tree.
    """
    config = read_config(where, key)
    try:
        with torch.device("meta"):
            return architecture(config)[0].from_config(config, dtype=dtype)
    except Exception as error:  # transformers raises whatever a wrong configuration leads to
        raise UserError(
            f"{key}={where}: no causal language model can be built of its configuration"
            f" ({first_line(error)}). Give a folder with config.json, or the name of a hub model"
            " where the hub can be reached."
        ) from error


def pair_without_weights(model: ModelConfig) -> dict[str, Any]:
    """Build target and draft by role, those that would be trained here too."""
    from nde_talf.draft_training.train_lm import build_llama

    dtype = getattr(torch, model.dtype)
    models = {
        role: without_weights(name, f"model.{role}", dtype) for role, name in model.given.items()
    }
    target = models.get("target")
    rows = target.config.get_text_config().vocab_size if target else model.vocab_size
    with torch.device("meta"):
        ours = {role: build_llama(lm, rows).to(dtype) for role, lm in model.trained.items()}
    return models | ours


def dry_run(config: Config, faults: Sequence[str] = ()) -> None:
    """Print what a run needs and does, and read its data.

    Raises UserError with all faults together, the given ones first.
    """
    faults = [*faults, *faults_of((check_config,), config)]
    steps = (_print_sizes, partial(_print_data, whole=not faults), _print_stages)
    first: dict[str, str] = {}
    for fault in "\n".join([*faults, *faults_of(steps, config)]).splitlines():
        first.setdefault(fault.partition(": ")[0], fault)  # of a model or file that is not there
    if first:
        raise UserError("\n".join(first.values()))


def _print_sizes(config: Config) -> None:
    """Print what models take, and traces at most: hidden states, scalars and labels of roots."""
    models, traces = pair_without_weights(config.model), config.traces
    table = Table("", "computed, not run", title=f"run={config.run}", title_justify="left")
    for role, model in models.items():
        count, name = model.num_parameters(), model.name_or_path or "trained here"
        size, text = model.dtype.itemsize, model.config.get_text_config()
        given = text.to_dict()
        table.add_row(f"{role}: {name}", f"{count:,} parameters, {decimal(count * size)}")
        if heads := given.get("num_attention_heads"):  # Mamba has none
            keys = given.get("num_key_value_heads") or heads
            keys *= given.get("head_dim") or text.hidden_size // heads
            context = decimal(2000 * text.num_hidden_layers * keys * size)
            table.add_row(f"{role}: 1,000 tokens of context", context)
    if "draft" in models:
        counts = {"train": traces.train_prompts, "validation": traces.validation_prompts}
        a_prompt = {split: -(-traces.new_tokens // traces.distance(split)) for split in counts}
        roots = len(traces.settings) * sum(counts[split] * a_prompt[split] for split in counts)
        target, draft = (model.get_output_embeddings().in_features for model in models.values())
        samples = max(traces.samples, traces.validation_samples)
        numbers = len(SCALARS) + 3 + samples * len(traces.verifiers) * len(TREES)
        size = decimal(roots * (2 * (target + 2 * draft) + 4 * numbers))
        table.add_row("traces on disk", f"{size}, at most {roots:,} roots")
    folder = Path(config.paths.checkpoints).absolute()
    disk = next(path for path in (folder, *folder.parents) if path.exists())
    table.add_row(f"free in {disk}", decimal(shutil.disk_usage(disk).free))
    console.print(table)
    _print_layer(config, models["target"].config.get_text_config().model_type)


def _print_layer(config: Config, model_type: str) -> None:
    """Print why vLLM could not serve the head, if a head is trained and it could not."""
    layer = config.draft.layer
    reason = not_for_vllm(family_named(model_type, layer))
    if reason and "draft" in config.stages:
        console.print(f"! draft.layer={layer}: {reason}")


def _print_data(config: Config, whole: bool) -> None:
    """Print how long the prompts are, and check that text and chat template can be read.

    whole: read the prompts too, which are not faulty so far.
    """
    from nde_talf.pipelines.pair import (
        check_template,
        set_prompts,
        shared_context,
        shared_tokenizer,
    )

    given = [source or "" for key, source, _ in sources(config) if key != "dialogues"]
    if given and not is_shipped(config.model.target) and {*given} <= {*BUILT_IN}:
        console.print(
            f"text and prompts: {', '.join(BUILT_IN[source] for source in given)}, which every"
            " machine has. For yours give data=prompts.jsonl"
        )
    if not config.model.target:
        console.print("prompts: their tokens are known once the tokenizer is trained")
        return
    tokenizer = shared_tokenizer(config.model)
    check_template(config)
    if not (whole and config.data.sets):
        return
    configs = (read_config(name, f"model.{role}") for role, name in config.model.given.items())
    context = shared_context(config, (longest_context(each.get_text_config()) for each in configs))
    prompts = set_prompts(config, tokenizer, context)
    longest = max(len(tokenizer(prompt.text)["input_ids"]) for prompt in prompts)
    console.print(
        f"prompts: {len(prompts)}, of at most {longest} tokens; the context of {context} leaves"
        f" {context - longest} for new ones. The first: {prompts[0].text[:200]!r}"
    )


def _print_stages(config: Config) -> None:
    """Print which stages are finished and to do, and what would stop them here."""
    to_do: set[str] = set()
    for name in config.stages:
        state = _state(every_stage()[name], config, to_do)
        console.print(f"stage={name}: {state}", soft_wrap=True)
    if config.engine.name == "vllm":
        here = importlib.util.find_spec("vllm") is not None
        console.print(f"vLLM samples the text; it is {'' if here else 'not '}installed here.")
    try:
        check_device(config.model.device)
    except UserError as error:
        console.print(f"On this machine the run would stop: {error}")


def _state(stage: Stage, config: Config, to_do: set[str]) -> str:
    """Say whether a stage is finished, left out, or to do, and then add it to those `to_do`.

    A stage is made again once one that it needs is.
    """
    folder = locate(stage, config)
    if stage.name in OF_DRAFT_MODEL and not config.drafts:
        return "skipped: no draft model"
    if stage.name == "draft" and config.model.device_map:
        return "skipped: no head is trained beside a target on several devices (model.device_map)"
    again = config.force or not to_do.isdisjoint(stage.needs(config))
    if again or not (folder / MANIFEST).exists():
        to_do.add(stage.name)
        return "to do"
    if other := changed(read_manifest(folder), plain(stage.settings(config))):
        return f"finished with other settings ({told(other)}): give force=true, or leave them out"
    return f"finished ({folder})"
