"""What the command lines have in common: how they start, `--help`, and the message for a wrong key
or value.

Imports no torch, so that the answer comes within a second.
"""

import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from rich.panel import Panel
from rich.text import Text

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import lacks_memory, memory_is_short
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.schema import check_fields
from nde_talf.pipelines.help import help_text, keys, presets
from nde_talf.pipelines.removed import removed

CONFIGS = str(Path(__file__).resolve().parents[1] / "configs")

_FILES = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
)
"""Faults of a name or folder that a user gave."""

T = TypeVar("T")


def fail(message: str) -> None:
    """Print one paragraph and exit with status 1."""
    try:
        console.print(Panel(Text(message), title="error", border_style="red"), soft_wrap=False)
    except MemoryError:
        os.write(1, f"error: {message}\n".encode())
    sys.exit(1)


def answer(error: BaseException) -> None:
    """Print what a person can do about an error and exit with status 1.

    One that nobody can do anything about is raised.
    """
    if isinstance(error, UserError):
        fail(str(error))
    chain = [error]
    while (
        cause := chain[-1].__cause__ or chain[-1].__context__
    ):  # libraries wrap errors in types of their own
        chain.append(cause)
    codes = {getattr(each, "errno", None) for each in chain}
    named = next((each for each in chain if isinstance(each, OSError) and each.filename), None)
    short = next((each for each in chain if lacks_memory(each)), None)
    if codes & {errno.ENOSPC, errno.EDQUOT} or any("No space left" in str(each) for each in chain):
        fail(
            f"the disk is full{f' ({named.filename})' if named else ''}. Free some space, or set"
            " paths.checkpoints to another disk, and run the same command again; everything"
            " finished so far is kept."
        )
    if short is not None:
        for each in chain:
            each.__traceback__ = None  # its frames hold what took the memory
        fail(
            "the memory is too small, or other programs use it"
            f" ({_first_lines(short).rstrip('.') or 'MemoryError'}). Close them, or ask for less at"
            " once: smaller batches (traces.micro_batch, draft.batch), shorter texts or smaller"
            " models; then run the same command again. Everything finished so far is kept."
        )
    if named is not None and codes & set(_FILES):
        fail(
            f"{named.filename}: {named.strerror}. Give another file or folder, such as"
            " paths.checkpoints=FOLDER."
        )
    raise error


def launch(main: Callable[[], None], schema: type, config: str) -> None:
    """Call Hydra's `main`, or print help if the arguments ask for it.

    What cannot be read or composed is answered in one paragraph, with status 1.

    Args:
        schema: dataclass of all keys.
        config: name of the YAML file of `configs/` that holds the defaults.
    """
    asked = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
    try:
        if {"--help", "-h"} & set(sys.argv):
            print_help(schema, config, sys.argv[1:])
        else:
            main()
    except (HydraException, OmegaConfBaseException, UserError, MemoryError) as error:
        if asked:
            raise
        if memory_is_short(error):
            answer(error)
        fail(explained(error, schema))
    finally:
        if not asked:
            os.environ.pop("HYDRA_FULL_ERROR", None)


def marked(argument: str) -> str:
    """Mark an option of a policy by ++, as Hydra wants it for a new key."""
    new = ("evaluation.policies.", "evaluation.policies=", "options.")
    return f"++{argument}" if argument.startswith(new) else argument


def print_help(schema: type, config: str, arguments: list[str]) -> None:
    """Print the overview, or the groups and keys that are named: `--help traces`, `model=tiny_ci
    --help model`.
    """
    from hydra import compose, initialize_config_dir

    overrides = [argument for argument in arguments if "=" in argument]
    wanted = [
        argument for argument in arguments if "=" not in argument and not argument.startswith("-")
    ]
    with initialize_config_dir(CONFIGS, version_base=None):
        composed = compose(config, overrides)
    main = OmegaConf.load(Path(CONFIGS) / f"{config}.yaml")
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # end quietly where the reader ends, as `| head` does
    print(help_text(schema, composed, main, wanted))


def settled(composed: DictConfig, schema: type[T]) -> T:
    """The composed configuration as `schema`.

    Raises UserError for a key that it does not have (Hydra's `+key=` adds any) and for a value that
    is missing or of another type.
    """
    for key in _unknown(composed):
        raise UserError(_no_such_key(key, schema))
    try:
        check_fields(OmegaConf.to_container(composed, resolve=True), schema=schema)
        return OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        missing = ", ".join(sorted(OmegaConf.missing_keys(composed)))
        raise UserError(
            f"{missing}: it has no value yet; give {missing}=... See --help all for every key."
        ) from error
    except OmegaConfBaseException as error:
        raise UserError(
            f"the configuration does not fit: {_first_lines(error)} See --help all for every key."
        ) from error


def explained(error: Exception, schema: type) -> str:
    """An error of Hydra or OmegaConf about a command line, as one paragraph."""
    text = str(error)
    if isinstance(error, UserError):
        return text
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        inner = value.replace('"', '\\"')
        if not equals:
            return (
                f"{error.override}: this cannot be read; every argument is key=value, such as"
                " run=mine."
            )
        return (
            f"{error.override}: this cannot be read ({_first_lines(error).rstrip('.')}). A value"
            " with brackets, commas, quotes, colons or equals signs goes in double quotes inside"
            f" single ones: '{key}=\"{inner}\"'."
        )
    if isinstance(error, MissingConfigException) and (
        found := re.search(r"Could not (?:find|load) '([^']+)'", text)
    ):
        group, _, name = found[1].rpartition("/")
        options = [*presets(group)]
        close = difflib.get_close_matches(name, options, 1)
        meant = f" Did you mean {group}={close[0]}?" if close else ""
        return (
            f"{group}={name}: there is none of that name.{meant} Choose from {', '.join(options)}."
        )
    if isinstance(error, ConfigCompositionException) and (
        found := re.search(r"Could not override '([^']+)'", text)
    ):
        return _no_such_key(found[1].split("@")[0], schema)
    if found := re.search(r"Error merging override (.+)", text):
        return (
            f"{found[1]}: {_first_lines(error.__cause__ or error)} See --help all for every key and"
            " its value."
        )
    return f"{_first_lines(error)} See --help all for every key."


def nearest(key: str, schema: type) -> str | None:
    """The key that was probably intended: one spelt alike, or one with the same last part in
    another group.
    """
    known = [key.name for key in keys(schema)]
    same = [other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2]]
    return next(iter(difflib.get_close_matches(key, known, 1, 0.75) or same), None)


def _no_such_key(key: str, schema: type) -> str:
    if instead := removed(key):
        return f"{key}: {instead}"
    meant = nearest(key, schema)
    return (
        f"{key}: there is no such key."
        + (f" Did you mean {meant}?" if meant else "")
        + " See --help all for every key."
    )


def _unknown(node: Any, prefix: str = "") -> Iterator[str]:
    """Keys of the composed configuration that its dataclasses do not have."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing():
        return
    kind = OmegaConf.get_type(node)
    known = {each.name for each in fields(kind)} if is_dataclass(kind) else node
    for key in node:
        if key in known:
            yield from _unknown(node._get_node(key), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _first_lines(error: BaseException) -> str:
    """The message of an OmegaConf error, without its notes about types."""
    passed_over = re.compile(r"\s*(full_key|reference_type|object_type|See |$)")
    text = " ".join(
        [line.strip() for line in str(error).splitlines() if not passed_over.match(line)][:2]
    )
    return text if text.endswith(".") else f"{text}."
