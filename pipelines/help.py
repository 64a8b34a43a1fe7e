"""What `--help` prints: keys with type, value and docstring, under their config group and the
group's presets.

Alone it prints an overview; `--help GROUP` prints one group and `--help all` everything.

The docstrings are the string literals under the fields of the settings dataclasses. They are read
from the source, so that help imports no torch and takes less than a second. Example of one key:

    traces.samples  int = 2
        Super-trees drawn at each root; a label is their mean.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING as REQUIRED
from omegaconf import DictConfig, OmegaConf

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.schema import ALLOWED, OPTIONS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FIRST = ("paths", "model", "tracking")
"""Groups whose keys `--help` prints without being asked: a first-time user needs them.

Of the others it prints a line each.
"""
NAME = "NAME"
"""Stands for the name of a set or corpus in a preset's YAML file, in a key such as
`data.sets.NAME.source`.
"""


@dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes:
        name: with dots, such as `model.target_lm.steps`.
        annotation: its type, as help prints it.
        default: of its dataclass; None where it has none.
        text: the docstring under its field; empty where there is none.
        parent: the dataclass that it is a field of.
        schema: the dataclass that it stands for, if it is a group.
        options: for a field that holds one of several dataclasses, these by name.
    """

    name: str
    annotation: str
    default: Any
    text: str
    parent: type
    schema: type | None
    options: dict[str, type]


def keys(schema: type, prefix: str = "") -> Iterator[Key]:
    """All keys of a dataclass of dataclasses, groups too, in the order of the source."""
    types, source = get_type_hints(schema), _source(schema)
    for each in fields(schema):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        own, (annotation, text) = types[each.name], source[each.name]
        names = (
            each.metadata[ALLOWED].names
            if ALLOWED in each.metadata
            else each.metadata.get("choices")
        )
        if names and not all(re.search(rf"\b{re.escape(own)}\b", text) for own in names):
            text += f" Choose from {', '.join(names)}."
        inner = next((part for part in (own, *get_args(own)) if is_dataclass(part)), None)
        name, options = prefix + each.name, each.metadata.get(OPTIONS, {})
        yield Key(
            name, annotation, None if default is MISSING else default, text, schema, inner, options
        )
        if inner:
            yield from keys(
                inner, name + {dict: f".{NAME}.", list: "[0]."}.get(get_origin(own), ".")
            )
        for option in options.values():
            yield from keys(option, f"{name}.")


@cache
def _source(schema: type) -> dict[str, tuple[str, str]]:
    """The type and the docstring of each field of a dataclass, from its source and that of its
    bases.
    """
    found: dict[str, tuple[str, str]] = {}
    for own in filter(is_dataclass, reversed(schema.__mro__)):
        for field, following in pairwise(
            [*_classes(own.__module__)[own.__name__].body, ast.Pass()]
        ):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = ""
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    text = " ".join(str(following.value.value).split())
                found[field.target.id] = ast.unparse(field.annotation).replace("None", "null"), text
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    nodes = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def presets(group: str) -> dict[str, str]:
    """The presets of a config group, each with the comment that its YAML file begins with."""
    found = {}
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        comments = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        found[path.stem] = " ".join(line[2:] for line in comments if not line.startswith("# @"))
    return found


def help_text(schema: type, composed: DictConfig, main: DictConfig, wanted: list[str]) -> str:
    """The overview: usage, a line for every group, and the keys of FIRST.

    With `wanted` the keys and groups of these names.

    Args:
        schema: dataclass of all keys.
        composed: the configuration as the other arguments make it; its values are printed.
        main: the YAML file that it was composed from: its header is the usage, its defaults say
            which groups have presets.
        wanted: groups (`traces`), keys (`traces.samples`), last parts of keys (`samples`), or
            `all`.

    Raises:
        UserError: there is no key or group of a name.
    """
    every = list(keys(schema))
    groups = {key.name: key for key in every if key.schema and "." not in key.name}
    unions = {key.name for key in every if key.options}
    width = min(shutil.get_terminal_size((120, 0)).columns, 120)
    with_presets = {
        name for default in main.defaults if not isinstance(default, str) for name in default
    }
    lines, shown = [], every if wanted == ["all"] else []
    for name in wanted if not shown else ():
        found = [
            key
            for key in every
            if key.name == name or key.name.startswith((f"{name}.", f"{name}["))
        ]
        found = found or [key for key in every if key.name.rpartition(".")[2] == name]
        if not found:
            raise UserError(
                f"--help {name}: there is no such key or group; the groups are {', '.join(groups)}."
            )
        shown += found
    if not wanted:
        lines = [main.hydra.help.header.rstrip()]
        if others := [name for name in groups if name not in FIRST]:
            about = {
                name: textwrap.shorten(_about(groups[name].schema), width - 14, placeholder=" ...")
                for name in others
            }
            lines += [
                "",
                "Groups of keys:",
                "",
                *(f"  {name:<12}{text}" for name, text in about.items()),
            ]
        shown = [
            key for key in every if key.name.count(".") < 2 and key.name.split(".")[0] not in others
        ]
    group = None
    for key in shown:
        top = key.name.split(".")[0] if key.schema or "." in key.name else ""
        if top != group:
            lines += ["", f"{top}: {_about(groups[top].schema)}" if top in groups else "General"]
            named = presets(top) if top in with_presets else {}
            if named and not wanted:
                every_name = f"presets: {top}={', '.join(named)}"
                lines += textwrap.wrap(
                    every_name, width, initial_indent="  ", subsequent_indent="    "
                )
            else:
                for name, text in named.items():
                    lines += _wrapped(f"{top}={name}  {text}", width, "  ")
            lines.append("")
            group = top
        if key.options or (key.schema and "." in key.name):
            lines += _wrapped(f"{key.name}: {key.text}", width, "  ")
        elif key.name.endswith(".name") and key.name.removesuffix(".name") in unions:
            lines += _wrapped(f"{key.name}={key.default}: {_about(key.parent)}", width, "  ")
        elif key.schema is None:
            lines.append(f"  {key.name}  {key.annotation} = {_shown(composed, key)}")
            lines += _wrapped(key.text, width, "      ")
    return "\n".join(lines).lstrip("\n")


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent="      ")


def _about(schema: type) -> str:
    """The first paragraph of a dataclass's docstring, as one line."""
    return " ".join((inspect.getdoc(schema) or "").split("\n\n")[0].split())


def _shown(composed: DictConfig, key: Key) -> str:
    """The value as YAML writes it on one line, a long one cut; of a name that the user chooses, the
    default.
    """
    value = key.default
    if NAME not in key.name.split("."):
        value = OmegaConf.select(composed, key.name, default=value, throw_on_missing=False)
    if value == REQUIRED:
        return "(required)"
    text = yaml.safe_dump(
        OmegaConf.to_container(OmegaConf.create([value])), default_flow_style=True, width=1 << 30
    )
    return textwrap.shorten(text.strip()[1:-1], 60, placeholder=" ...")
