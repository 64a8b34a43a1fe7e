"""Settings: dataclasses whose annotations say what a field may hold, checked by pydantic.

Imports no torch. Example, and what a user reads who gives `traces.stride=0`:

    @settings("traces")
    class TracesConfig:
        stride: Count = 16
        dtype: Annotated[str, one_of(DTYPES)] = "float32"

    traces.stride=0: it should be greater than or equal to 1.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field as dataclass_field
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import (
    Annotated,
    Any,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.json_validation import adapter

T = TypeVar("T")

SEED = 2**32 - 1
"""Largest seed that every library takes."""
MANY = 1_000_000_000
"""Largest number of things that nobody has to count, such as steps."""
NAME = "NAME"
"""Stands for a name that the user chooses, in a key such as `data.sets.NAME.source`."""
_PYDANTIC = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)


def one_of(names: Iterable[str]) -> AfterValidator:
    """Return the check that a text is one of `names`."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"there is none; choose from {', '.join(names)}")
        return name

    return AfterValidator(check)


def matching(pattern: str, words: str) -> AfterValidator:
    """Return the check that a text matches `pattern` in full; `words` say what that means."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(f"it must be {words}")
        return text

    return AfterValidator(check)


def _distinct(values: list[Any]) -> list[Any]:
    if not values or len({*values}) < len(values):
        raise ValueError("it should name at least one thing, and none twice")
    return values


def _no_address(place: str) -> str:
    address = re.match(r"(\w[\w+.-]*)(://|::)|data:", place)
    if address and address[1] != "hf":
        raise ValueError(
            "it is an address, and only files and folders of this machine and the hub are read:"
            " download it first"
        )
    return place


def local(place: str) -> str:
    """Return a place of the user's with the home folder written out.

    What is there gets its absolute path, by which it is found from another working folder too. A
    bare name may be a preset or a hub name as well, and is a folder's if that holds a model.
    """
    place = os.path.expanduser(place)
    own = "/" in place or "." in place or os.path.exists(os.path.join(place, "config.json"))
    return os.path.abspath(place) if own and os.path.exists(place) else place


def _folder(place: str) -> str:
    if place.startswith("hf://"):
        raise ValueError("it is a place on the hub: give a folder of this machine")
    return os.path.expanduser(_no_address(place))


Distinct = AfterValidator(_distinct)
Count = Annotated[int, Field(ge=1, le=MANY)]
Natural = Annotated[int, Field(ge=0, le=MANY)]
Seed = Annotated[int, Field(ge=0, le=SEED)]
Few = Annotated[int, Field(ge=1, le=10_000)]
"""A count that every step of decoding pays for."""
Number = Annotated[int, Field(ge=1, le=1_000_000)]
"""Any other count of at least one."""
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
"""Length of a text."""
Batch = Annotated[int, Field(ge=1, le=4096)]
Threads = Annotated[int, Field(ge=0, le=4096)]
Width = Annotated[int, Field(ge=1, le=65_536)]
"""Numbers in a vector."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
"""A fraction above 0."""
Part = Annotated[float, Field(gt=0, lt=1)]
"""A fraction that is neither nothing nor the whole."""
Amount = Annotated[float, Field(ge=0, le=1e6)]
"""A weight, a temperature or a sharpness."""
Rate = Annotated[float, Field(gt=0, le=10)]
"""A learning rate."""
Text = Annotated[
    str,
    matching(
        r"[^/\0]{0,255}(/[^/\0]{0,255}){0,63}",
        "a text of at most 255 characters between slashes, without NUL",
    ),
]
"""A name, or a path that a file system can hold."""
Place = Annotated[Text, AfterValidator(_no_address), AfterValidator(local)]
"""A file, a folder or a name on the hub."""
Folder = Annotated[Text, Field(min_length=1), AfterValidator(_folder)]
"""A folder of this machine."""
LongText = Annotated[
    str,
    matching(r"[^\0\ud800-\udfff]{0,1000000}", "a text without NUL, of a million letters"),
]
DEVICE = r"cpu|cuda(:[0-9]{1,3})?"
Device = Annotated[str, matching(DEVICE, "cpu, cuda or cuda:N")]


@dataclass_transform(frozen_default=True, field_specifiers=(Field, dataclass_field))
def settings(group: str = "", *, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Return the decorator that makes a checked dataclass, whose instances cannot be changed.

    An instance that is made in Python with a wrong value raises UserError too.

    Args:
        group: what keys begin with in messages, such as "traces".
        kw_only: fields are given by name alone.
    """

    def decorate(kind: type[T]) -> type[T]:
        made: Any = dataclass(kind, config=_PYDANTIC, kw_only=kw_only, frozen=True)
        checked = made.__init__

        @wraps(checked)
        def construct(self: Any, *values: Any, **named: Any) -> None:
            try:
                checked(self, *values, **named)
            except ValidationError as error:
                raise UserError(explained(error, made, named, group)) from error

        made.__init__ = construct
        return made

    return decorate


def validated(content: Mapping[str, Any], schema: type[T]) -> T:
    """Return `content`, keys and values as YAML has them, as the settings class `schema`.

    Raises:
        UserError: a key does not exist or a value is not allowed. The message names the key, the
            value and what is allowed.
    """
    try:
        return cast(T, adapter(cast(Any, schema)).validate_python(content))
    except ValidationError as error:
        raise UserError(explained(error, schema, content)) from error


def explained(error: ValidationError, schema: type, content: Any, group: str = "") -> str:
    """Return the first fault that pydantic found as one sentence.

    content: what was validated. group: what its keys begin with.
    """
    fault = error.errors(include_url=False)[0]
    path = _path(fault, content)
    key = ".".join([*([group] if group else []), *map(str, path)]).replace(".[", "[")
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return no_such_key(key, [f"{group}.{name}".strip(".") for name in keys(schema)])
    if fault["type"] in ("missing", "missing_argument"):
        return f"{key}: it has no value yet; give {key}=..."
    if fault["type"] == "union_tag_invalid":
        tag, names = fault["ctx"]["tag"], fault["ctx"]["expected_tags"].replace("'", "")
        return f"{key}.name={tag}: there is none; choose from {names}."
    if fault["type"] in ("model_attributes_type", "dataclass_type"):
        given, named = shown(fault["input"]), f"{key}.name" in keys(schema)
        instead = f"give {key}.name={given}" if named else "--help lists them"
        return f"{key}={given}: it is a group of keys; {instead}."
    message = fault["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = re.sub("^(Input|List) should", "it should", message).partition(", unable to")[0]
    given = "" if fault["loc"][-1:] == ("[key]",) else f"={shown(fault['input'])}"
    return f"{key}{given}: {message}."


def _path(fault: ErrorDetails, content: Any) -> list[str]:
    """Return the keys that lead to a fault, without the names by which pydantic tells unions."""
    path: list[str] = []
    *outer, last = fault["loc"] or ("",)
    for part in outer:
        if isinstance(part, int) and isinstance(content, (list, tuple)):
            path, content = [*path, f"[{part}]"], content[part]
        elif isinstance(content, Mapping) and part in content:
            path, content = [*path, str(part)], content[part]
    if isinstance(last, int):
        return [*path, f"[{last}]"]
    return path if last == "[key]" else [*path, str(last)]


def shown(value: Any) -> str:
    """Return a value as a command line gives it; a long one is cut."""
    text = str(value).replace("'", "") if isinstance(value, (list, tuple, dict)) else str(value)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """List all keys of nested settings, groups too, such as `data.sets.NAME.source`."""
    hints = get_type_hints(schema)
    for each in fields(schema):
        hint, key = hints[each.name], prefix + each.name
        yield key
        for inner in _settings_in(hint):
            named = {dict: f".{NAME}", list: "[0]"}.get(get_origin(hint), "")
            yield from keys(inner, f"{key}{named}.")


def _settings_in(hint: Any) -> Iterator[type]:
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from _settings_in(part)


def no_such_key(key: str, known: Iterable[str]) -> str:
    """Return the sentence for a key that does not exist; it proposes the one that was meant."""
    meant = nearest(key, known)
    proposal = f" Did you mean {meant}?" if meant else ""
    return f"{key}: there is no such key.{proposal} See --help for every key."


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the key that was probably intended.

    It is spelt alike, or has the same last part in another group.
    """
    known = list(known)
    same = [other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2]]
    return next(iter(difflib.get_close_matches(key, known, 1, 0.75) or same), None)
