"""Checks before any work starts, of what depends on several groups of settings or on this machine.

Each settings dataclass checks its own values when it is made. `check_config` adds what crosses them
and imports no torch; `machine_checks` looks at the device, the latency tables and the login.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nde_talf.data.dialogues.settings import DialogueConfig
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.settings import (
    ANSWERS,
    BUILT_IN,
    FILE_FORMATS,
    SELF,
    STANDARD_LIBRARY,
    DataConfig,
    is_hub_name,
)
from nde_talf.data.text.shipped import is_shipped
from nde_talf.data.traces.settings import GREEDY
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.model_record import lacks
from nde_talf.decoding.models.gguf import SUFFIX
from nde_talf.pipelines.config.command_line import CONFIGS
from nde_talf.pipelines.config.schema import OF_DRAFTER, Config, table_file
from nde_talf.pipelines.runs.finished import finished, meant

Source = tuple[str, str | None, str | None]
"""A group of keys, the file or hub dataset that it names, and the template of its rows."""


def check_config(config: Config, others: Sequence[str] = ()) -> None:
    """Raise UserError with every fault of settings that cannot work, and the `others` known."""
    data, dialogues = config.data, config.dialogues
    given = [*sources(data, dialogues.source)]
    faults = [
        *others,
        *_lengths(config),
        *_stages(config),
        *_drafter(config),
        *_files(given),
        *_ignored(data, config.model.target),
        # A dry run answers for another machine.
        *(() if config.dry_run else _installed(config.engine)),
        *_models(config.model.given, config.draft.warm_start),
        *_base(config.base, config.paths.checkpoints),
        *_texts(given, dialogues, config.selector.table),
    ]
    if faults:
        raise UserError("\n".join(faults))


def faults_of(works: Iterable[Callable[..., object]], *arguments: Any) -> list[str]:
    """Call all of `works`; return what their errors say."""
    faults = []
    for work in works:
        try:
            work(*arguments)
        except UserError as error:
            faults.append(str(error))
    return faults


def names_on_hub(config: Config) -> list[str]:
    """List models and text that may be on the hub: neither built in nor a data file."""
    named = sources(config.data, config.dialogues.source)
    given = (source for _, source, _ in named if source not in BUILT_IN)
    found = [source for source in given if source and Path(source).suffix not in FILE_FORMATS]
    return [*config.model.given.values(), *found]


def _stages(config: Config) -> Iterator[str]:
    """Find labels and prompts that a stage needs and that the stages before it do not make."""
    data, traces = config.data, config.traces
    selector, evaluation = config.selector, config.evaluation
    for name in evaluation.settings:
        if name not in traces.settings and name != GREEDY:
            yield (
                f"evaluation.settings: '{name}' is not traced, so it has no labels; choose from"
                f" traces.settings={traces.settings} and {GREEDY}, greedy decoding."
            )
    for name in selector.verifiers:
        if name not in traces.verifiers:
            yield (
                f"selector.verifiers: {name} has no labels; add it to"
                f" traces.verifiers={traces.verifiers}."
            )
    if selector.folds > traces.train_prompts:
        yield (
            f"selector.folds={selector.folds}: there are"
            f" traces.train_prompts={traces.train_prompts} to hold out in turn;"
            " raise them or lower selector.folds."
        )
    if evaluation.calibration_prompts > traces.validation_prompts:
        yield (
            f"evaluation.calibration_prompts={evaluation.calibration_prompts}: they are taken from"
            " the traces' validation split, which has"
            f" traces.validation_prompts={traces.validation_prompts}."
        )
    count = traces.train_prompts + traces.validation_prompts
    left = data.prompt_count - data.test_prompts
    if evaluation.most_prompts > data.test_prompts or count > left:
        yield (
            f"data.prompt_count={data.prompt_count} gives {data.test_prompts} prompts for the"
            f" evaluation (data.test_fraction) and {left} for traces; asked for are"
            f" evaluation.prompts={evaluation.most_prompts} and {count} of traces. Raise"
            " data.prompt_count or ask for fewer."
        )


def _drafter(config: Config) -> Iterator[str]:
    """Find what does not fit the drafter of the trees that are traced."""
    traces = config.traces
    if traces.drafter == "lm" and not config.model.has_draft:
        yield (
            "traces.drafter=lm: there is no draft model. Leave the key out, and the head drafts, or"
            " give a draft model (model.draft=FOLDER_OR_HUB_NAME)."
        )
    if traces.labels == "text" and config.drafter == "head":
        yield (
            "traces.labels=text: such labels are for a draft model, and here the head drafts. Leave"
            " the key out, or give traces.labels=trees."
        )
    if config.stage in OF_DRAFTER and config.drafter == "nobody":
        yield (
            f"stage={config.stage}: nothing drafts (traces.drafter=nobody, or model.device_map with"
            " no draft model). Leave the key out, or give model.draft."
        )


def _lengths(config: Config) -> Iterator[str]:
    """Find texts that the context of a model that is trained here cannot hold."""
    model, data = config.model, config.data
    prompt = 0 if data.sets else data.prompt_tokens[1]
    asked = {
        "model.length": model.length,
        "latency.contexts": max(config.latency.contexts),
        "data.prompt_tokens with traces.new_tokens": prompt + config.traces.new_tokens,
        "data.prompt_tokens with evaluation.new_tokens": prompt + config.evaluation.new_tokens,
    }
    for role, trained in model.trained.items():
        for key, tokens in asked.items():
            if tokens > trained.max_length:
                yield (
                    f"{key}: {tokens} tokens do not fit model.{role}_lm.max_length="
                    f"{trained.max_length}: lower them, or raise that."
                )


def sources(data: DataConfig, dialogues: str | None = None) -> Iterator[Source]:
    """List the groups of keys that name a file or a hub dataset, with its source and template."""
    if not data.mix and data.source not in (ANSWERS, SELF):
        yield "data", data.source, None
    for name, corpus in data.mix.items():
        yield f"data.mix.{name}", corpus.source, corpus.template
    for name, entry in data.sets.items():
        if not entry.parts:
            yield f"data.sets.{name}", entry.source, entry.template
        for i, part in enumerate(entry.parts):
            yield f"data.sets.{name}.parts[{i}]", part.source, part.template
    if dialogues is not None:
        yield "dialogues", dialogues, None


def _texts(given: Iterable[Source], dialogues: DialogueConfig, table: str) -> Iterator[str]:
    """Find templates that are none, and latency tables that are not there."""
    templates = {f"{key}.template": template for key, _, template in given}
    templates["dialogues.user"] = dialogues.user
    templates["dialogues.assistant"] = dialogues.assistant
    yield from faults_of(
        [
            *(RowTemplate(text or "", "", key).check for key, text in templates.items()),
            partial(table_file, table, Path()),
        ]
    )


def _files(given: Iterable[Source]) -> Iterator[str]:
    """Find files that are not given, not there, or have bad rows that are not to be left out."""
    for key, source, _ in given:
        if not source:
            example = {"data": "corpus.jsonl", "dialogues": "chats.jsonl"}.get(key, "prompts.jsonl")
            yield (
                f"{key}.source is not given: set {key}.source={example} (or .txt, .parquet, or the"
                " name of a hub dataset)."
            )
            continue
        path = Path(os.path.expanduser(source))
        if path.suffix in FILE_FORMATS and not path.is_file() and "://" not in source:
            yield (
                f"{key}.source={source}: there is no such file (relative paths start at the working"
                " folder)."
            )


def _ignored(data: DataConfig, target: str | None) -> Iterator[str]:
    """Find a corpus that would not be read, as text ships with the shipped pair, or by nobody."""
    if data.source == SELF and not target:
        yield f"data={SELF}: a target writes it; give model.target=FOLDER_OR_HUB_NAME."
    usual: Any = OmegaConf.to_container(OmegaConf.load(Path(CONFIGS, "data", "traffic.yaml")))
    other = (
        data.mix != DataConfig(**usual).mix
        if data.mix
        else data.source not in (STANDARD_LIBRARY, ANSWERS, SELF)
    )
    if is_shipped(target) and other and not data.sets:
        key = "data.mix" if data.mix else f"data.source={data.source}"
        yield (
            f"{key}: the shipped pair reads the text that ships with it. Train a small pair on"
            " yours with model=tiny3, or give another model.target."
        )


def _installed(engine: EngineConfig) -> Iterator[str]:
    """Find engines whose package is not installed."""
    if engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        yield (
            "engine.name=vllm: vLLM is not installed. Install it (docs/traces.md), or use"
            " engine.name=transformers."
        )
    if engine.workers > 1 and importlib.util.find_spec("ray") is None:
        yield (
            f"engine.workers={engine.workers} needs Ray: pip install -e '.[ray]', or set"
            " engine.workers=1."
        )


def _models(given: dict[str, str], warm_start: str | None) -> Iterator[str]:
    """Find models and heads that are no folder nor, for a model, a GGUF file or a hub name."""
    folders = {f"model.{role}": name for role, name in given.items()}
    if warm_start:
        folders["draft.warm_start"] = warm_start
    for key, folder in folders.items():
        path, model = Path(folder), key != "draft.warm_start"
        if path.is_dir() or (model and _is_model(folder)):
            continue
        gguf = model and path.suffix == SUFFIX
        fault = "it is a file" if path.exists() else f"there is no such {'file' * gguf or 'folder'}"
        yield (
            f"{key}={folder}: {lacks(path) or fault}. Give a folder, or for a model a GGUF file or"
            " a hub name (NAME or ORG/NAME)."
        )


def _is_model(name: str) -> bool:
    """Return whether `name` is a GGUF file, or may be on the hub."""
    path = Path(name)
    return path.is_file() if path.suffix == SUFFIX else is_hub_name(name) and not path.exists()


def _base(base: str | None, checkpoints: str) -> Iterator[str]:
    """Find a base that is no run."""
    runs = Path(checkpoints).absolute()
    if base and base not in finished(runs):
        yield (
            f"base={base}: there is no run of that name with a finished stage in"
            f" {runs.resolve()}.{meant('base', base, runs)}"
        )
