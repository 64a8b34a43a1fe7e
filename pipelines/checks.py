"""Checks before any work starts, of what depends on several groups of settings or on this machine.

Each settings dataclass checks its own values when it is made. `check_config` adds what crosses them
and imports no torch; `check_machine` looks at the device, the latency tables and the login.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.settings import BUILT_IN, FILE_FORMATS, is_hub_name
from nde_talf.data.traces.settings import GREEDY, SETTINGS
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import validated
from nde_talf.pipelines.config import MEASURED, OF_DRAFT_MODEL, Config, table_file
from nde_talf.pipelines.finished import finished, meant
from nde_talf.pipelines.machine import check_device, reach_hub


def check_config(config: Config) -> None:
    """Raise UserError for settings that cannot work, whichever stage would meet them first."""
    validated(asdict(config), Config)  # it may have been changed since it was made
    checks = (
        _check_lengths,
        _check_draft,
        _check_selector,
        _check_sources,
        _check_installed,
        _check_folder,
    )
    for check in (*checks, _check_base, _check_prompts):
        check(config)
    for name in config.evaluation.settings:
        if name not in config.traces.settings and name != GREEDY:
            where = (
                "is no sampling setting"
                if name not in SETTINGS
                else "is not traced, so it has no labels"
            )
            raise UserError(
                f"evaluation.settings: '{name}' {where}; choose from"
                f" traces.settings={config.traces.settings} and {GREEDY}, greedy decoding."
            )


def check_machine(config: Config) -> None:
    """Raise UserError for a device, a latency table or a login that this machine does not have.

    Imports torch.
    """
    from nde_talf.pipelines.policy_table import make_policy
    from nde_talf.selector.latency import LatencyTable
    from nde_talf.selector.network import selectable

    check_device(config.model.device)
    selectable(config.selector.verifiers, "selector.verifiers")
    sources = {source for _, source in _sources(config) if source and source not in BUILT_IN}
    given = [
        config.model.target,
        config.model.draft,
        *(entry for entry in sources if Path(entry).suffix not in FILE_FORMATS),
    ]
    reach_hub(filter(None, given))
    for policy, options in config.evaluation.policies.items():
        try:
            make_policy(policy, options)
        except UserError as error:
            raise UserError(f"evaluation.policies.{policy}: {error}") from None
    for name in config.selector.tables:
        if name != MEASURED:
            LatencyTable.load(table_file(name, Path()))
    if config.tracking.mode == "online":
        _check_login()


def _check_draft(config: Config) -> None:
    """Raise UserError for a stage of the draft model where there is none."""
    if config.stage in OF_DRAFT_MODEL and not config.drafts:
        raise UserError(
            f"stage={config.stage} needs a draft model, and model.draft is not given. Give one"
            " (model.draft=FOLDER_OR_HUB_NAME stage=pair), or use the stages pair, draft and"
            " evaluate, which decode with a draft head."
        )


def _check_selector(config: Config) -> None:
    """Raise UserError for a selector whose verifiers, latency tables or folds are not there."""
    selector, traces = config.selector, config.traces
    for name in selector.verifiers:
        if name not in traces.verifiers:
            raise UserError(
                f"selector.verifiers: {name} has no labels; add it to"
                f" traces.verifiers={traces.verifiers}."
            )
    for name in selector.tables:
        table_file(name, Path())
    if selector.folds > traces.train_prompts:
        raise UserError(
            f"selector.folds={selector.folds}: there are"
            f" traces.train_prompts={traces.train_prompts} to hold out in turn;"
            " raise them or lower selector.folds."
        )


def _check_prompts(config: Config) -> None:
    """Raise UserError where more prompts are asked for than there are."""
    traces, evaluation, pool, test = (
        config.traces,
        config.evaluation,
        config.data.prompt_count,
        config.data.test_prompts,
    )
    if evaluation.calibration_prompts > traces.validation_prompts:
        raise UserError(
            f"evaluation.calibration_prompts={evaluation.calibration_prompts}: they are taken from"
            " the traces' validation split, which has"
            f" traces.validation_prompts={traces.validation_prompts}."
        )
    count = traces.train_prompts + traces.validation_prompts
    if evaluation.prompts > test or count > pool - test:
        raise UserError(
            f"data.prompt_count={pool} gives {test} prompts for the evaluation (data.test_fraction)"
            f" and {pool - test} for traces; asked for are evaluation.prompts={evaluation.prompts}"
            f" and {count} of traces. Raise data.prompt_count or ask for fewer."
        )


def _check_lengths(config: Config) -> None:
    """Raise UserError for texts that the context of a pair that is trained here cannot hold."""
    new_tokens = max(config.traces.new_tokens, config.evaluation.new_tokens)
    longest = 0 if config.data.sets else config.data.prompt_tokens[1] + new_tokens
    asked = {
        "model.length": config.model.length,
        "latency.contexts": max(config.latency.contexts),
        "data.prompt_tokens with traces.new_tokens or evaluation.new_tokens": max(
            longest, new_tokens
        ),
    }
    for role in () if config.model.target else ("target_lm", "draft_lm"):
        room = getattr(config.model, role).max_length
        for key, tokens in asked.items():
            if tokens > room:
                raise UserError(
                    f"{key}: {tokens} tokens do not fit model.{role}.max_length={room}: lower them,"
                    " or raise that."
                )


def _sources(config: Config) -> Iterator[tuple[str, str | None]]:
    """Every key that names a file or a hub dataset, and its value."""
    data = config.data
    if not data.mix:
        yield "data.source", data.source
    for name, corpus in data.mix.items():
        yield f"data.mix.{name}.source", corpus.source
    for name, entry in data.sets.items():
        for part, of in {f".parts[{i}]": part for i, part in enumerate(entry.parts)}.items() or [
            ("", entry)
        ]:
            yield f"data.sets.{name}{part}.source", of.source
    if config.dialogues.source is not None:
        yield "dialogues.source", config.dialogues.source


def _check_sources(config: Config) -> None:
    """Check that every file that a user gives, or that a preset leaves to the user, is there.

    Raises:
        UserError: a file is missing, or was not given.
    """
    folders = {
        "model.target": config.model.target,
        "model.draft": config.model.draft,
        "draft.warm_start": config.draft.warm_start,
    }
    for key, folder in folders.items():
        hub = (
            key != "draft.warm_start"
            and is_hub_name(folder or "")
            and not Path(folder or "").exists()
        )
        if folder and not hub and not Path(folder).is_dir():
            fault = "it is a file" if Path(folder).exists() else "there is no such folder"
            raise UserError(
                f"{key}={folder}: {fault}. Give a folder, or for a model a hub name (NAME or"
                " ORG/NAME)."
            )
    for key, source in _sources(config):
        if not source:
            example = {"data.source": "corpus.jsonl", "dialogues.source": "chats.jsonl"}.get(
                key, "prompts.jsonl"
            )
            raise UserError(
                f"{key} is not given: set {key}={example} (or .txt, .parquet, or the name of a hub"
                " dataset)."
            )
        if (
            Path(source).suffix in FILE_FORMATS
            and "://" not in source
            and not Path(source).expanduser().is_file()
        ):
            raise UserError(
                f"{key}={source}: there is no such file (relative paths start at the working"
                " folder)."
            )
    templates = {
        f"data.mix.{name}.template": entry.template for name, entry in config.data.mix.items()
    }
    for name, entry in config.data.sets.items():
        each = [entry.template, *(part.template for part in entry.parts)]
        templates |= {
            f"data.sets.{name}.template{f' (part {i})' if i else ''}": text
            for i, text in enumerate(each)
        }
    templates |= {
        f"dialogues.{name}": getattr(config.dialogues, name) for name in ("user", "assistant")
    }
    for key, template in templates.items():
        RowTemplate(template or "", "", key).check()


def _check_installed(config: Config) -> None:
    """Raise UserError for an engine whose package is not installed."""
    engine = config.engine
    if engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "engine.name=vllm: vLLM is not installed; see README, or use engine.name=transformers."
        )
    if engine.workers > 1 and importlib.util.find_spec("ray") is None:
        raise UserError(
            f"engine.workers={engine.workers} needs Ray: pip install -e '.[ray]', or set"
            " engine.workers=1."
        )


def _check_base(config: Config) -> None:
    """Raise UserError for a `base` that is no run."""
    runs = Path(config.paths.checkpoints)
    if config.base and config.base not in finished(runs):
        lacking = (
            f"base={config.base}: there is no run of that name with a finished stage in"
            f" {runs.resolve()}."
        )
        raise UserError(lacking + meant("base", config.base, runs))


def _check_folder(config: Config) -> None:
    """Raise UserError if nothing can be written where the runs lie."""
    folder = Path(config.paths.checkpoints).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "is not a folder" if not there.is_dir() else "cannot be written to"
        raise UserError(
            f"paths.checkpoints={config.paths.checkpoints}: {there} {why}. Give another folder."
        )


def _check_login() -> None:
    """Raise UserError if W&B has no key: it would ask for one, or fail, after work was done."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    host = urlsplit(wandb.setup().settings.base_url).hostname
    stored = False
    with suppress(OSError, NetrcParseError):
        stored = netrc(os.environ.get("NETRC")).authenticators(host) is not None
    if not (
        stored or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    ):
        raise UserError(
            f"tracking=online: W&B has no API key for {host} here. Run `wandb login`, or set"
            " WANDB_API_KEY, or use tracking=offline."
        )
