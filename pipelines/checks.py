"""What can be known to be wrong before any work starts: `check_config` from the configuration alone, without torch;
`check_machine` from what is installed."""

import difflib
import importlib.util
import os
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from data.dialogues.settings import check_dialogue_config
from data.text.settings import FILE_FORMATS
from data.traces.settings import SETTINGS, check_traces_config
from decoding.common.errors import UserError
from decoding.names import ON_PATHS
from pipelines.config import ASKED_FOR, METHODS, STAGES, Config, test_prompts
from pipelines.device_check import check_device
from pipelines.finished import finished
from pipelines.tables import MEASURED, table_file

DTYPES = ("float32", "bfloat16", "float16", "float64")
FORKING = ("ddp_spawn", "ddp_fork", "fsdp")  # strategies whose processes run the training alone


def check_config(config: Config) -> None:
    """Raise UserError for settings that cannot work, whichever stage would meet them first."""
    if config.stage not in ("all", *STAGES, *ASKED_FOR):
        raise UserError(f"stage={config.stage}: there is none; choose all or one of {', '.join((*STAGES, *ASKED_FOR))}.")
    if (config.model.target is None) != (config.model.draft is None):
        given, missing = ("target", "draft") if config.model.target else ("draft", "target")
        raise UserError(f"model.{given} is given and model.{missing} is not: give both, or neither to train a small pair.")
    for role in ("target", "draft"):
        folder = getattr(config.model, role)
        if folder and (Path(folder).is_absolute() or folder.startswith(".")) and not Path(folder).is_dir():
            raise UserError(f"model.{role}={folder}: there is no such folder.")
    for key, dtype in (("model.dtype", config.model.dtype), ("traces.dtype", config.traces.dtype)):
        if dtype not in DTYPES:
            raise UserError(f"{key}={dtype}: there is no such type; use float32, bfloat16 or float16.")
    if config.engine.name not in ("auto", "transformers", "vllm"):
        raise UserError(f"engine.name={config.engine.name}: it is auto, transformers or vllm.")
    if config.engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("engine.name=vllm: vLLM is not installed; see README, or use engine.name=transformers.")
    if config.engine.workers > 1 and importlib.util.find_spec("ray") is None:
        raise UserError(f"engine.workers={config.engine.workers} needs Ray: pip install -e '.[ray]', or set engine.workers=1.")
    if config.verify and config.stage != "traces":
        raise UserError("verify=true checks finished traces: give stage=traces with it.")
    if config.tracking.mode not in ("online", "offline", "disabled"):
        raise UserError(f"tracking.mode={config.tracking.mode}: it is online, offline or disabled.")
    if config.base == config.run:
        raise UserError(f"base={config.base} is this run itself: name another run, or leave base out.")
    _check_folder(config)
    _check_base(config)
    _check_sources(config)
    _check_bounds(config)
    check_traces_config(config.traces)
    check_dialogue_config(config.dialogues)
    for name in config.evaluation.settings:
        if name not in config.traces.settings:
            where = "is no sampling setting" if name not in SETTINGS else "is not traced, so it has no labels"
            raise UserError(
                f"evaluation.settings: '{name}' {where}; choose from traces.settings ({', '.join(config.traces.settings)})."
            )
    _check_selector(config)
    wanted, pool = config.traces.train_prompts + config.traces.validation_prompts, config.data.prompt_count
    if config.evaluation.calibration_prompts > config.traces.validation_prompts:
        raise UserError(
            f"evaluation.calibration_prompts={config.evaluation.calibration_prompts}: they are taken from the traces' "
            f"validation split, which has traces.validation_prompts={config.traces.validation_prompts}."
        )
    test = test_prompts(config.data)
    if config.evaluation.prompts > test or wanted > pool - test:
        raise UserError(
            f"data.prompt_count={pool} gives {test} prompts for the evaluation (data.test_share) and {pool - test} for "
            f"traces; asked for are evaluation.prompts={config.evaluation.prompts} and {wanted} of traces. Raise "
            "data.prompt_count or ask for fewer."
        )


def check_machine(config: Config) -> None:
    """Raise UserError for a device, a latency table or a login that this machine does not have. Imports torch."""
    from selector.latency import LatencyTable
    from selector.selector import selectable

    check_device(config.model.device)
    selectable(config.selector.verifiers, "selector.verifiers")
    for name in config.selector.tables:
        if name != MEASURED:
            LatencyTable.load(table_file(name, Path()))
    if config.tracking.mode == "online":
        _check_login()


def _check_base(config: Config) -> None:
    """Raise UserError for a `base` that is no run."""
    runs = Path(config.paths.checkpoints)
    if not config.base or config.base in finished(runs):
        return
    known = finished(runs)
    close = difflib.get_close_matches(config.base, known, 1)
    meant = f" Did you mean base={close[0]}?" if close else f" The runs there: {', '.join(known) or 'none'}."
    raise UserError(f"base={config.base}: there is no run of that name with a finished stage in {runs.resolve()}.{meant}")


def _check_folder(config: Config) -> None:
    """Raise UserError if nothing can be written where the runs lie."""
    folder = Path(config.paths.checkpoints).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "is not a folder" if not there.is_dir() else "cannot be written to"
        raise UserError(f"paths.checkpoints={config.paths.checkpoints}: {there} {why}. Give another folder.")


def _check_sources(config: Config) -> None:
    """Raise UserError where a preset waits for a file of the user's that was not given, or is not there."""
    given = {"data.source": config.data.source} if not config.data.mix else {}
    given |= {f"data.mix.{name}.source": own.source for name, own in config.data.mix.items()}
    for name, own in config.data.sets.items():
        given |= {f"data.sets.{name}.source": own.source or ""}
        given |= {f"data.sets.{name}.parts[{i}].source": part.source for i, part in enumerate(own.parts)}
    for key, source in given.items():
        if Path(source).suffix in FILE_FORMATS and "://" not in source and not Path(source).expanduser().is_file():
            raise UserError(f"{key}={source}: there is no such file (relative paths start at the working folder).")
    if not config.data.source:
        raise UserError("data=text needs a source: data.source=corpus.jsonl (or .txt, .parquet, or the name of a hub dataset).")
    for name, own in config.data.sets.items():
        if not own.source and not own.parts:
            key = f"data.sets.{name}.source"
            raise UserError(f"{key} is not given: {key}=prompts.jsonl, or the name of a hub dataset.")
    if config.dialogues.source == "":
        raise UserError("dialogues=file needs a source: dialogues.source=chats.jsonl, or the name of a hub dataset.")


def _check_login() -> None:
    """Raise UserError if W&B has no key: it would ask for one, or fail, after work was done."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    host = urlsplit(wandb.setup().settings.base_url).hostname
    stored = False
    with suppress(OSError, NetrcParseError):
        stored = netrc(os.environ.get("NETRC")).authenticators(host) is not None
    if not (stored or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")):
        raise UserError(
            f"tracking=online: W&B has no API key for {host} here. Run `wandb login`, or set WANDB_API_KEY, or use "
            "tracking=offline."
        )


def _check_selector(config: Config) -> None:
    """Raise UserError for selectors that cannot be trained or judged."""
    own = config.selector
    if not own.verifiers or not own.tables:
        raise UserError("selector.verifiers and selector.tables each need at least one entry.")
    for name in own.verifiers:
        if name in ON_PATHS:
            raise UserError(
                f"selector.verifiers: {name} verifies single paths, and a selector chooses among trees: use {ON_PATHS[name]}, "
                "which is the same on a path."
            )
        if name not in config.traces.verifiers:
            raise UserError(
                f"selector.verifiers: {name} has no labels; add it to traces.verifiers ({', '.join(config.traces.verifiers)})."
            )
    for name in own.tables:
        table_file(name, Path())
    if own.folds > config.traces.train_prompts:
        raise UserError(
            f"selector.folds={own.folds}: there are traces.train_prompts={config.traces.train_prompts} to hold out in turn; "
            "raise them or lower selector.folds."
        )
    if own.pricing not in ("table", "eq11"):
        raise UserError(f"selector.pricing={own.pricing}: it is table or eq11.")
    for name in config.evaluation.methods:
        if name not in METHODS:
            raise UserError(f"evaluation.methods: there is no '{name}'; choose from {', '.join(METHODS)}.")


def _check_bounds(config: Config) -> None:
    """Raise UserError for numbers, lists and types that a later stage could not use."""
    lowest = {
        "traces.shard_prompts": (config.traces.shard_prompts, 1),
        "traces.node_chunk": (config.traces.node_chunk, 0),
        "engine.workers": (config.engine.workers, 1),
        "engine.tensor_parallel": (config.engine.tensor_parallel, 1),
        "traces.validation_samples": (config.traces.validation_samples or 2, 2),
        "traces.samples": (config.traces.samples, 2),  # a standard error and the split-half figure need two
        "selector.epochs": (config.selector.epochs, 1),
        "selector.batch": (config.selector.batch, 1),
        "selector.devices": (config.selector.devices, 1),
        "selector.folds": (config.selector.folds, 2),
        "latency.repeats": (config.latency.repeats, 1),
        "evaluation.prompts": (config.evaluation.prompts, 1),
        "evaluation.passes": (config.evaluation.passes, 1),
        "evaluation.new_tokens": (config.evaluation.new_tokens, 2),  # the prefill gives the first
        "evaluation.calibration_prompts": (config.evaluation.calibration_prompts, 1),
        "model.length": (config.model.length, 2),
    }
    for key, (value, least) in lowest.items():
        if value < least:
            raise UserError(f"{key}={value}: it must be at least {least}.")
    for key, values, count in (
        ("data.prompt_tokens", config.data.prompt_tokens, 2),
        ("selector.hidden", config.selector.hidden, 2),
        ("latency.contexts", config.latency.contexts, None),
    ):
        if not values or min(values) < 1 or (count and len(values) != count):
            raise UserError(f"{key}={values}: it must be a list of {count or 'one or more'} numbers of at least 1.")
    if config.data.prompt_tokens[0] > config.data.prompt_tokens[1]:
        raise UserError(f"data.prompt_tokens={config.data.prompt_tokens}: the shortest comes first.")
    config.draft.__post_init__()  # again: a configuration can be changed after it was made
    if config.draft.devices > 1 and config.draft.strategy not in FORKING:
        raise UserError(
            f"draft.strategy={config.draft.strategy} starts this command once for every device, and they would write the same "
            f"files: use {' or '.join(FORKING)} here, or call draft_training.train_head.fit_head from a script of your own."
        )
    if not 0 < config.data.test_share < 1:
        raise UserError(f"data.test_share={config.data.test_share}: it is a share between 0 and 1.")
    if not 0 < config.data.held_out < 1:
        raise UserError(f"data.held_out={config.data.held_out}: it is a share between 0 and 1.")
