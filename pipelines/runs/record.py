"""A run's own record: the arguments it was made with, which a later command need not repeat.

Imports no torch.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from nde_talf.decoding.common.errors import masked
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import shown
from nde_talf.pipelines.config.command_line import presets, unquoted
from nde_talf.pipelines.config.own_data import in_full, without_data
from nde_talf.pipelines.runs.finished import COMMAND, NAME, read_record

OF_ONE_COMMAND = ("run", "base", "stage", "force", "dry_run", "paths.checkpoints", "sweep")
"""Keys that a later command does not take from the record."""


def key_of(argument: str) -> str:
    """Return the key of an argument, such as `model` of `+model=tiny3`."""
    return argument.lstrip("+~").partition("=")[0]


_asked: list[str] = []


def asked() -> str:
    """Return the settings that the command line gave itself, as they were written."""
    left = {*OF_ONE_COMMAND} - {"paths.checkpoints"}
    return shlex.join(each for each in _asked if key_of(each) not in left)


def remember(run: Path, base: str | None) -> None:
    """Write the arguments of this process or sweep job into the folder of a run."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    arguments = [masked(each.removeprefix("++")) for each in given]
    command = shlex.join(["nde", "run", *arguments])
    recorded = {"command": command, "base": base, "arguments": lasting(arguments)}
    write_json(run / COMMAND, recorded)


def lasting(arguments: Iterable[str]) -> list[str]:
    """Return the arguments that a record gives: no secret, no option, no folder or step of one."""
    return [
        each
        for each in arguments
        if key_of(each) not in OF_ONE_COMMAND
        and not key_of(each).startswith(("hydra", "-"))
        and "***" not in each
    ]


def completed(arguments: Sequence[str]) -> list[str]:
    """Write out own data and add what the records of the run and its base hold beside it."""
    _asked[:] = arguments
    given = list(in_full(arguments))
    values = {key_of(each): unquoted(each.partition("=")[2]) for each in given}
    root = Path(values.get("paths.checkpoints", "checkpoints")).expanduser()
    name = values.get("run", "default")
    swept = "run" not in values and {"sweep", "-m", "--multirun"} & values.keys()
    # Without more keys, a run that ended before it had made anything is continued.
    own, base = _recorded(root, None if swept else name, anyway=not lasting(given))
    base = values.get("base") or base
    complete = merged(merged(_recorded(root, base)[0], own), given)
    if without_data(complete):
        console.print("no data is given: the target writes text itself (data=self)")
        complete.insert(0, "data=self")
        given.append("data=self")
    if taken := [shown(each) for each in complete if each not in given]:
        whose = f"run={name}" + f" and base={base}" * bool(base)
        console.print(f"from the record of {whose}: {' '.join(taken)}", style="dim")
    if base and "base" not in values:
        complete.append(f"base={base}")
    return complete


def _recorded(root: Path, name: str | None, anyway: bool = False) -> tuple[list[str], str | None]:
    """Return the arguments and the base in a run's record; none for a wrong name."""
    record = read_record(root / name, anyway) if name and NAME.fullmatch(name) else {}
    return lasting(record.get("arguments", [])), record.get("base")


def merged(recorded: Sequence[str], asked: Sequence[str]) -> list[str]:
    """Return recorded arguments and those asked for, which win.

    Another preset of a group drops what was recorded below the group.
    """
    keys = {key_of(each) for each in asked}
    new = {key_of(each) for each in asked if each not in recorded and presets(key_of(each))}
    kept = [
        each
        for each in recorded
        if (key := key_of(each)) not in keys and key.partition(".")[0] not in new
    ]
    return [*kept, *asked]
