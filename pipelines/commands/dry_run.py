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

from nde_talf.data.dialogues.read import read_dialogues
from nde_talf.data.text.pair import load_models
from nde_talf.data.text.settings import ANSWERS, SELF
from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.common.model_record import place_of
from nde_talf.decoding.common.progress import console, duration
from nde_talf.decoding.models.configuration import bytes_of_context, longest_context
from nde_talf.decoding.models.loading import architecture, read_config
from nde_talf.draft_training.training.lm_training import build_llama
from nde_talf.pipelines.commands.estimate import Size, from_size, measured, minutes, works
from nde_talf.pipelines.commands.quiet import quiet
from nde_talf.pipelines.config.checks import check_config, faults_of
from nde_talf.pipelines.config.schema import OF_DRAFTER, Config, ModelConfig
from nde_talf.pipelines.runs.attempt import changed, locate, told
from nde_talf.pipelines.runs.manifest import MANIFEST, plain, read_manifest
from nde_talf.pipelines.stages.pair_text import set_prompts, shared_context
from nde_talf.pipelines.stages.shared_tokenizer import check_template, shared_tokenizer
from nde_talf.pipelines.stages.table import BY_NAME

TO_DO = "to do"
LOADED = 2_000_000_000
"""Bytes of a target that is loaded to time its passes: 30 s at 70 MB a second."""
LONG = 3600
"""Seconds beyond which a dry run names the keys that make a run shorter."""
SHORTER = "data.prompt_count, traces.train_prompts, draft.steps, evaluation.prompts"
BASE = 600_000_000
"""Bytes that the libraries take. Models take theirs twice, where products are packed."""


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
    dtype = getattr(torch, model.dtype)
    models = {
        role: without_weights(name, f"model.{role}", dtype) for role, name in model.given.items()
    }
    target = models.get("target")
    rows = target.config.get_text_config().vocab_size if target else model.vocab_size
    with torch.device("meta"):
        ours = {role: build_llama(lm, rows).to(dtype) for role, lm in model.trained.items()}
    return models | ours


def expected(config: Config, measure: bool = False) -> tuple[dict[str, float], str]:
    """Estimate the minutes of the stages that are to do, and say what the estimate is made from.

    measure: time passes of the target, where it is soon loaded.
    """
    to_do = [name for name, state in _states(config).items() if state == TO_DO]
    if not to_do:
        return {}, ""
    models, given = pair_without_weights(config.model), config.model.target
    target, size = models["target"], size_of(models)
    decoding = config.evaluation.threads
    if measure and given and _soon_loaded(given):
        quiet()
        (loaded,) = load_models([given], *config.model.placed)
        prices, how = measured(loaded, decoding), "passes timed here"
    else:
        prices = from_size(size.target, target.dtype.itemsize, config.model.device, decoding)
        how = "sizes, not measured"
    work = works(config, size)
    return {name: minutes(work[name], prices) for name in to_do}, how


def _soon_loaded(target: str) -> bool:
    """Tell whether a model's files are here, and are small."""
    folder = place_of(target)
    files = folder.glob("*.safetensors") if folder else ()
    return 0 < sum(file.stat().st_size for file in files) < LOADED


def size_of(models: dict[str, Any]) -> Size:
    """Count the parameters that a token meets in target, head and draft."""
    target, *drafts = models.values()
    met, readout = _met(target), target.get_output_embeddings().weight.numel()
    layer = (met - readout) // target.config.get_text_config().num_hidden_layers
    return Size(met, layer + readout, *map(_met, drafts))


def _met(model: Any) -> int:
    """Count the parameters that a token meets: none of an input embedding of its own."""
    tied = model.config.tie_word_embeddings
    return model.num_parameters() - (0 if tied else model.get_input_embeddings().weight.numel())


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


def _bytes_of_context(model: Any) -> int:
    return bytes_of_context(model.config.get_text_config(), model.dtype)


def most_memory(config: Config, models: dict[str, Any]) -> int:
    """Bound the memory of all stages, in bytes.

    It holds the models, and logits in training (four times) or the cache of sampled texts.
    """
    held = 2 * sum(model.num_parameters() * model.dtype.itemsize for model in models.values())
    head, length = config.draft.batch * config.head_length, config.model.length
    tokens = max([head, *(lm.batch * length for lm in config.model.trained.values())])
    rows = models["target"].get_output_embeddings().out_features
    logits = 16 * rows * tokens
    answers = config.engine.batch * max(config.dialogues.new_tokens, config.data.answer_tokens)
    answers *= config.data.source in (ANSWERS, SELF) or config.dialogues.regenerate
    return BASE + held + max(logits, answers * max(map(_bytes_of_context, models.values())))


def _print_sizes(config: Config) -> None:
    """Print what models take, and what stages take at most."""
    models, traces = pair_without_weights(config.model), config.traces
    table = Table("", "computed, not run", title=f"run={config.run}", title_justify="left")
    for role, model in models.items():
        count, name = model.num_parameters(), model.name_or_path or "trained here"
        size = decimal(count * model.dtype.itemsize)
        table.add_row(f"{role}: {name}", f"{count:,} parameters, {size}")
        if cached := _bytes_of_context(model):
            table.add_row(f"{role}: 1,000 tokens of context", decimal(1000 * cached))
    table.add_row("memory, at most about", decimal(most_memory(config, models)))
    if "draft" in models:
        sizes = (model.get_output_embeddings().in_features for model in models.values())
        table.add_row("traces on disk, at most", decimal(traces.space(*sizes)))
    folder = Path(config.paths.checkpoints).absolute()
    disk = next(path for path in (folder, *folder.parents) if path.exists())
    table.add_row(f"free in {disk}", decimal(shutil.disk_usage(disk).free))
    console.print(table)


def _print_data(config: Config, whole: bool) -> None:
    """Print how long the prompts are, and check that text and chat template can be read.

    whole: read the prompts too, which are not faulty so far.
    """
    if not config.model.target:
        console.print("prompts: their tokens are known once the tokenizer is trained")
        return
    tokenizer = shared_tokenizer(config.model)
    check_template(config)
    if whole and config.data.sets:
        given = config.model.given.items()
        configs = (read_config(name, f"model.{role}") for role, name in given)
        lengths = (longest_context(each.get_text_config()) for each in configs)
        context = shared_context(config.model, lengths)
        prompts = set_prompts(config, tokenizer, context)
        longest = max(len(tokenizer(prompt.text)["input_ids"]) for prompt in prompts)
        console.print(
            f"prompts: {len(prompts)}, of at most {longest} tokens; the context of {context} leaves"
            f" {context - longest} for new ones. The first: {prompts[0].text[:200]!r}"
        )
    if whole and config.dialogues.source and config.stage in ("all", "draft"):
        read_dialogues(config.dialogues, config.seed)


def _print_stages(config: Config) -> None:
    """Print which stages are finished and to do, and what would stop them here."""
    faults = faults_of((check_device,), config.model.device)
    left, how = ({}, "") if faults else expected(config, measure=True)
    for name, state in _states(config).items():
        about = f", about {duration(60 * left[name])}" if name in left else ""
        console.print(f"stage={name}: {state}{about}")
    if left:
        total = 60 * sum(left.values())
        console.print(f"all together about {duration(total)} on this machine, by {how}")
        if total > LONG:
            console.print(f"Smaller numbers make it shorter: {SHORTER}.")
    if config.engine.name == "vllm":
        here = importlib.util.find_spec("vllm") is not None
        console.print(f"vLLM samples the text; it is {'' if here else 'not '}installed here.")
    for fault in faults:
        console.print(f"On this machine the run would stop: {fault}")
    if faults:
        console.print("Minutes are measured where the device is: give this command there.")


def _states(config: Config) -> dict[str, str]:
    """Say of each stage that is asked for whether it is finished, left out or to do.

    A stage that needs one that is to do is to do as well.
    """
    states = dict[str, str]()
    for name in config.stages:
        stage = BY_NAME[name]
        folder = locate(stage, config)
        again = config.force or TO_DO in map(states.get, stage.needs(config))
        if name in OF_DRAFTER and config.drafter == "nobody":
            state = "skipped: nothing drafts (traces.drafter=nobody)"
        elif name == "draft" and config.model.device_map:
            several = "a target on several devices (model.device_map)"
            state = f"skipped: no head is trained beside {several}"
        elif again or not (folder / MANIFEST).exists():
            state = TO_DO
        elif other := changed(read_manifest(folder), plain(stage.settings(config))):
            state = f"finished with other settings ({told(other)})"
            state += ": give force=true, or leave them out"
        else:
            state = f"finished ({folder})"
        states[name] = state
    return states
