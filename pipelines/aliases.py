"""Names of an earlier version, read for one version more with a notice: keys, values and presets.

Each settings module lists its own in `OLD_KEYS` (old key -> today's, with `*` for any name) and
`OLD_PRESETS`. They are translated in two places: in the arguments of a command line, and in the
settings that a finished stage remembers, so that nothing is made again because a key was renamed.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Any

import nde_talf.data.dialogues.settings
import nde_talf.data.engines.settings
import nde_talf.data.text.settings
import nde_talf.data.traces.settings
import nde_talf.draft_training.lm_settings
import nde_talf.draft_training.settings
import nde_talf.selector.settings
from nde_talf.decoding.common.errors import RenamedWarning
from nde_talf.pipelines import config
from nde_talf.pipelines.help import keys

_ROOMS = (
    nde_talf.data.text.settings,
    nde_talf.data.dialogues.settings,
    nde_talf.data.engines.settings,
    nde_talf.data.traces.settings,
    nde_talf.draft_training.settings,
    nde_talf.draft_training.lm_settings,
    nde_talf.selector.settings,
    config,
)
OLD_KEYS: dict[str, str] = {
    old: new for room in _ROOMS for old, new in getattr(room, "OLD_KEYS", {}).items()
}
ADDED_KEYS = {key for room in _ROOMS for key in getattr(room, "ADDED_KEYS", ())}
OLD_PRESETS: dict[str, dict[str, str]] = {
    k: names for room in _ROOMS for k, names in getattr(room, "OLD_PRESETS", {}).items()
}


def new_key(key: str, old_keys: dict[str, str] = OLD_KEYS) -> str | None:
    """Today's name of a key; None for one that was not renamed.

    Example: `data.test_share` -> `data.test_fraction`.
    """
    for old, new in old_keys.items():
        if match := re.fullmatch(re.escape(old).replace(r"\*", r"([^.]+)"), key):
            for name in match.groups():
                new = new.replace("*", name, 1)
            return new
    return None


def current(argument: str, old_keys: dict[str, str] = OLD_KEYS) -> str:
    """An argument of the command line under today's names, with a RenamedWarning for each that was
    replaced.

    Examples: `+data.test_share=0.2` -> `+data.test_fraction=0.2`, `data={test_share: 0.2}` ->
    `data={test_fraction: 0.2}`, `traces=paper000` -> `traces=nde`. An option of a policy is a new
    key, which Hydra marks by ++: `evaluation.policies.salf.nodes=32` ->
    `++evaluation.policies.salf.nodes=32`.
    """
    if argument.startswith(("evaluation.policies.", "evaluation.policies=")):
        return f"++{argument}"
    key, equals, value = argument.lstrip("+~").partition("=")
    mark, value = argument[: -len(key + equals + value) or None], equals + value
    for old, new in OLD_PRESETS.get(key, {}).items():
        value = _replaced(
            rf"(?<=[=\[,\s]){re.escape(old)}(?=[\],\s]|$)",
            value,
            f"{key}={old}",
            f"{key}={new}",
            new,
        )
    for old, new in old_keys.items():
        (group, _, old_name), (new_group, _, new_name) = old.rpartition("."), new.rpartition(".")
        parts = group.split(".")
        inside = any(
            new_key(key, {".".join(parts[:depth]): ""}) is not None
            for depth in range(1, len(parts) + 1)
        )
        if group == new_group and inside and "{" in value:
            value = _replaced(
                rf"(?<=[{{,\s]){old_name}(?=\s*:)",
                value,
                f"{group}.{old_name}",
                f"{group}.{new_name}",
                new_name,
            )
    today = new_key(key, old_keys)
    if today and not (
        today.startswith(f"{key}.") and value.startswith("={")
    ):  # what was a value is a group of keys today
        _notice(f"{key}=", f"{today}=")
        key = today
    return mark + key + value


def current_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a finished stage remembers, with today's keys and values.

    Where a field holds one of several dataclasses today, keys that mean nothing for the one that is
    named are left out.
    """
    found: dict[str, Any] = {}
    for path, value in _leaves(settings):
        names = config.OLD_VALUES.get(".".join(path), {})
        new = new_key(".".join(path))
        _put(
            found,
            new.split(".") if new else path,
            [names.get(each, each) for each in value] if names else value,
        )
    for key in keys(config.Config):
        *groups, name = key.name.split(".")
        if key.options and isinstance(
            own := reduce(lambda node, group: node.get(group, {}), groups, found).get(name), dict
        ):
            option = asdict(key.options[own["name"]]())
            _put(
                found,
                (*groups, name),
                {field: own.get(field, default) for field, default in option.items()},
            )
    return found


def add_defaults(settings: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """`settings` with the defaults, which are what the earlier version did, of keys that were added
    since and `wanted` has.
    """
    for key in keys(config.Config):
        group, _, name = key.name.partition(".")
        if (
            key.name in ADDED_KEYS
            and isinstance(settings.get(group), dict)
            and name in (wanted.get(group) or {})
        ):
            settings[group].setdefault(name, asdict(key.default) if key.schema else key.default)
    return settings


def _put(settings: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *groups, name = path
    for group in groups:
        settings = settings.setdefault(group, {})
    settings[name] = value


def _leaves(
    settings: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _replaced(pattern: str, text: str, old: str, new: str, name: str) -> str:
    text, count = re.subn(pattern, name, text)
    if count:
        _notice(old, new)
    return text


def _notice(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} now.", RenamedWarning, stacklevel=4)
