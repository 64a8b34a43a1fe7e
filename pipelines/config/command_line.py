"""Start of every command line, and its message for a wrong key or value.

Imports no torch, so that the answer comes within a second.
"""

import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.panel import Panel
from rich.text import Text

from nde_talf.decoding.common.errors import UserError, lacks_memory, masked, memory_is_short
from nde_talf.decoding.common.files import DISK, disk_error
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import keys, local, shown, validated
from nde_talf.pipelines.commands.output import steady

CONFIGS = str(Path(__file__).resolve().parents[2] / "configs")

_FILES = (
    errno.ENOENT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
)
"""Faults of a name or folder that a user gave."""

_OPTIONS = {"--help", "-h", "--cfg", "-c", "--resolve", "--info", "-i"}
_OPTIONS |= {"--multirun", "-m"}
"""Options of Hydra: they print, but the last two run every combination of values."""
_TEXTS = ("template", "chat_template", "user", "assistant", "prompt")
"""Keys, by their last part, whose values are texts of many lines."""
_PLACES = ("checkpoints", "target", "draft", "warm_start", "source", "table")
"""Keys, by their last part, whose values are files, folders or names on the hub."""
USAGE = 2
"""Exit status for a command line that cannot be read, as of any parser of options."""
LONGEST = 10_000
"""Characters of an argument, at most."""

T = TypeVar("T")


class UsageError(UserError):
    """The command line names what there is not, or cannot be read."""

    status = USAGE


def register(name: str, schema: type) -> None:
    """Make the keys of a settings class, with their defaults, known to Hydra.

    name: the file of `configs/` that begins with them.
    """
    content = asdict(schema())
    if "draft" in content:  # the loss's other keys follow from its name
        content["draft"]["loss"] = {"name": content["draft"]["loss"]["name"]}
    ConfigStore.instance().store(name=f"{name}_schema", node=content)


def fail(message: str, status: int = 1) -> None:
    """Print one paragraph and exit with `status`."""
    message = masked(message).encode(errors="replace").decode()  # it may hold half characters
    try:
        console.print(Panel(Text(message), title="error", border_style="red"))
    except MemoryError:
        os.write(1, f"error: {message}\n".encode())
    sys.exit(status)


def answer(error: BaseException) -> None:
    """Print what a person can do about an error and exit with status 1, or 2 for a `UsageError`.

    One that nobody can do anything about is raised.
    """
    if isinstance(error, UserError):
        fail(str(error), error.status)
    chain = list(_causes(error))
    named = next((each for each in chain if isinstance(each, OSError) and each.filename), None)
    short = next(filter(lacks_memory, chain), None)
    if disk := next(filter(None, map(_fault_of_disk, chain)), None):
        fail(str(disk_error(named.filename if named else "paths.checkpoints", disk)))
    if short is not None:
        _fail_for_memory(chain, short)
    if named is not None and named.errno in _FILES:
        fail(
            f"{named.filename}: {named.strerror}. Give another file or folder, such as"
            " paths.checkpoints=FOLDER."
        )
    try:
        os.getcwd()
    except FileNotFoundError:
        fail(
            "the working folder was removed: change to one that is there, and give the same command"
            " again. Everything finished so far is kept."
        )
    raise error


def _fail_for_memory(chain: Iterable[BaseException], short: BaseException) -> None:
    for each in chain:
        each.__traceback__ = None  # its frames hold what took the memory
    fail(
        "the memory is too small, or other programs use it"
        f" ({_first_lines(short) or 'MemoryError'}). Close them, or ask for less at"
        " once: smaller batches (traces.micro_batch, draft.batch), shorter texts or smaller"
        " models; then run the same command again. Everything finished so far is kept."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """List an error and what caused it: libraries wrap errors in types of their own."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _fault_of_disk(error: BaseException) -> int | None:
    """Return the number in `DISK` of an error, which libraries may say in words alone."""
    if isinstance(error, OSError) and error.errno in DISK:
        return error.errno
    return errno.ENOSPC if "No space left" in str(error) else None


@steady()
def launch(
    name: str,
    schema: type[T],
    work: Callable[[T], object],
    completed: Callable[[list[str]], list[str]] = list,
) -> None:
    """Compose the command line's configuration and hand it to `work`; Hydra prints help too.

    What cannot be read or composed is answered in one paragraph, with status 2. Secrets in the
    command line are masked from here on, as it is logged in many places, and in tracebacks.

    Args:
        name: the file of `configs/` that it starts from.
        schema: all keys.
        work: runs with the settings.
        completed: makes the arguments that Hydra reads of those that were given.
    """

    @hydra.main(version_base=None, config_path=CONFIGS, config_name=name)
    def main(composed: DictConfig) -> None:
        sys.argv[1:] = [masked(each.removeprefix("++")) for each in sys.argv[1:]]
        try:
            work(_read(composed, schema))
        except Exception as error:
            errors.append(error)  # Hydra would print the whole command line beside it

    arguments = sys.argv[1:]
    errors: list[Exception] = []
    register(name, schema)
    sys.excepthook = _show_traceback
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
    try:
        _check_arguments(arguments)
        sys.argv[1:] = map(marked, completed(arguments))
        main()
        if errors:
            answer(errors[0])
    except (HydraException, OmegaConfBaseException) as error:
        if memory_is_short(error):
            answer(error)
        fail(explained(error, schema), USAGE)
    except (UserError, MemoryError, OSError) as error:
        answer(error)
    except SystemExit as error:
        if error.code == USAGE and not errors:
            fail(
                f"{_shown(arguments)}: these options cannot be read; --help lists what can be set.",
                USAGE,
            )
        raise
    except (ValueError, RecursionError) as error:  # Hydra's own, of a command line
        if errors:
            raise
        fail(f"{_shown(arguments)}: this cannot be read ({_first_lines(error)}).", USAGE)


def _read(composed: DictConfig, schema: type[T]) -> T:
    """Return `settled`; what it refuses is an error of the command line."""
    try:
        return settled(composed, schema)
    except UserError as error:
        raise UsageError(str(error)) from error


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise UsageError for an argument that Hydra would end on in a traceback, or not at all."""
    for argument in arguments:
        if fault := _fault_of_argument(argument):
            raise UsageError(f"{_shown([argument])}: {fault}.")


def _fault_of_argument(argument: str) -> str:
    key = argument.partition("=")[0]
    if key.rpartition(".")[2] in _TEXTS:
        return "it is no UTF-8 text" * bool(re.search("[\ud800-\udfff]", argument))
    if not key.strip("+~"):
        return "there is no key; every argument is key=value, and --help lists the keys"
    if key.startswith("-") and key not in _OPTIONS:
        return "there is no such option; every argument is key=value, and --help lists the keys"
    if not argument.isprintable():
        return "it holds characters that cannot be shown; leave them out"
    if len(argument) > LONGEST:
        return f"it has {len(argument)} characters, and {LONGEST} can be read"
    return ""


def _shown(arguments: Sequence[str]) -> str:
    text = masked(" ".join(arguments))
    return shown("".join(c if c.isprintable() else "?" for c in text))


def _show_traceback(*raised: Any) -> None:
    """Print an error that nobody answers, as Python does, without secrets."""
    print(masked("".join(traceback.format_exception(*raised))), end="", file=sys.stderr)


def marked(argument: str) -> str:
    """Mark a key by ++, so that `settled` tells of an unknown one, and a run's name as text."""
    key, equals, value = argument.partition("=")
    if not equals or not re.match(r"[^\W\d]", key) or key.startswith("hydra") or presets(key):
        return argument
    place = local(unquoted(value))
    other = re.fullmatch(r"(null)?|.*\$\{.*", value) or ("," in value and not os.path.exists(place))
    if key.rpartition(".")[2] in _PLACES and not other:  # with a comma, a sweep
        return f"++{quoted(key, place)}"
    if key in ("run", "base") and re.fullmatch(r"[\w.+-]+", value) and value != "null":
        return f"++{key}='{value}'"
    return f"++{argument}"


def unquoted(value: str) -> str:
    """Return the text of a value that may be in quotes, as Hydra reads it."""
    quote = value[:1]
    if quote not in ("'", '"') or value[-1] != quote:
        return value
    return re.sub(rf"\\+(?={quote}|$)", lambda each: each[0][: len(each[0]) // 2], value[1:-1])


def quoted(key: str, value: str) -> str:
    """Write a key and a text as an argument that Hydra reads as they are."""
    return f"{key}='" + re.sub(r"(\\*)('|$)", r"\1\1\2", value).replace("'", "\\'") + "'"


def composed(schema: type[T], *overrides: str, config: str = "config") -> T:
    """Return what a command line gives, without running it. config: a file of `configs/`."""
    register(config, schema)
    GlobalHydra.instance().clear()  # of the command that asks, which is composed already
    with initialize_config_dir(CONFIGS, version_base=None):
        return settled(compose(config, [marked(override) for override in overrides]), schema)


def settled(composed: DictConfig, schema: type[T]) -> T:
    """Return the composed configuration as `schema`.

    Raises UserError for a key that it does not have and for a value that is not allowed.
    """
    content: Any = OmegaConf.to_container(composed, resolve=True)
    return validated(content, schema)


def presets(group: str) -> list[str]:
    """List the presets of a config group; none of a key that is no group."""
    return sorted(path.stem for path in (Path(CONFIGS) / group).glob("*.yaml"))


def explained(error: Exception, schema: type) -> str:
    """Return an error of Hydra or OmegaConf about a command line as one paragraph."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error, "prompt" in keys(schema))
    if isinstance(error, MissingConfigException):
        missing = re.search(r"Could not (?:find|load) '([^']+)'", text)
        if missing:
            return _no_such_preset(*missing[1].rsplit("/", 1))
    if bare := re.search(r"force-add of config groups is not supported: '\W*(\w+)=", text):
        its = [key for key in keys(schema) if key.startswith(f"{bare[1]}.")]
        return f"{bare[1]}: it has no presets; set its keys, {', '.join(its)}."
    return f"{_first_lines(error)}. See --help for every key."


def _unreadable(error: OverrideParseException, takes_prompt: bool) -> str:
    given = error.override.removeprefix("++")
    key, equals, value = given.partition("=")
    if not equals:
        such = f'prompt="{key}"' if takes_prompt else "run=mine"
        return f"{key}: this cannot be read; every argument is key=value, such as {such}."
    inner = value.replace('"', '\\"')
    return (
        f"{given}: this cannot be read ({_first_lines(error)}). A value"
        " with brackets, commas, quotes, colons or equals signs goes in double quotes inside"
        f" single ones: '{key}=\"{inner}\"'."
    )


def _no_such_preset(group: str, name: str) -> str:
    known = presets(group)
    close = difflib.get_close_matches(name, known, 1)
    meant = f" Did you mean {group}={close[0]}?" if close else ""
    return f"{group}={name}: there is none of that name.{meant} Choose from {', '.join(known)}."


def _first_lines(error: BaseException) -> str:
    """Return the message of an OmegaConf error, without its notes about types and its full stop."""
    passed_over = re.compile(r"\s*(full_key|reference_type|object_type|See |$)")
    text = " ".join(
        [line.strip() for line in str(error).splitlines() if not passed_over.match(line)][:2]
    )
    return text.replace("++", "").rstrip(".")  # see `marked`
