"""JSON against a declared type: what a file has to hold is said by a Python annotation, and checked
where the file is read.

`typed([1, 2.5], list[float])` is `[1, 2.5]`. `typed({"rows": "4"}, Shard)`, where `Shard` is a
TypedDict or a dataclass with an integer field `rows`, raises `ValueError: 'rows' is "4", and has to
be an integer`.
"""

import json
import sys
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST = 2**63
"""Integers lie below this: those that tensors and files can count."""
_WORDS = {
    int: "an integer",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def typed(value: Any, kind: Any, name: str = "") -> Any:
    """A value as JSON has it, as a `kind`; lists become tuples and objects become dataclasses where
    `kind` says so.

    Args:
        value: what json.loads returned.
        kind: int, float (finite, an integer will do), str, bool, None, Any; `list[X]`, `tuple[X,
            ...]`, `tuple[X, Y]`, `dict[str, X]`, `X | None`; a dataclass, which knows all keys; or
            a TypedDict, which passes others over.
        name: of the value in a message, such as "verify.nss"; empty for the whole.

    Raises:
        ValueError: it is not. The message names the first part that is not, and what it has to be.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (kind,) = (each for each in inner if each is not type(None))
        return typed(value, kind, name)
    if origin in (list, tuple):
        return _sequence(value, origin, inner, name)
    if origin is dict:
        return {
            key: typed(part, inner[1], _inside(name, key))
            for key, part in _of(value, dict, name).items()
        }
    if is_dataclass(kind) or is_typeddict(kind):
        return _fields(_of(value, dict, name), kind, name)
    return _of(value, kind, name)


def _sequence(value: Any, origin: Any, inner: tuple[Any, ...], name: str) -> Any:
    one = (
        inner[:1] if origin is list or inner[-1] is Ellipsis else ()
    )  # the type of every part; none: each has its own
    value = _of(value, list, name)
    if not one and len(value) != len(inner):
        raise ValueError(f"{_called(name)} holds {len(value)} values, and has to hold {len(inner)}")
    return origin(
        typed(part, one[0] if one else inner[at], f"{name}[{at}]") for at, part in enumerate(value)
    )


def _fields(value: dict[str, Any], kind: Any, name: str) -> Any:
    hints = _hints(kind)
    if is_typeddict(kind):
        required = kind.__required_keys__
    else:
        required = {
            each.name
            for each in fields(kind)
            if each.default is MISSING and each.default_factory is MISSING
        }
        if unknown := sorted(value.keys() - hints.keys()):
            raise ValueError(f"{_called(_inside(name, unknown[0]))} is not known")
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{_called(_inside(name, missing[0]))} is missing")
    own = {
        key: typed(part, hints[key], _inside(name, key)) if key in hints else part
        for key, part in value.items()
    }
    return own if is_typeddict(kind) else kind(**own)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _of(value: Any, kind: Any, name: str) -> Any:
    """`value` if it is of this plain type."""
    if kind is float:
        fine = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        )
    elif kind is int:
        fine = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    else:
        fine = value is None if kind in (None, type(None)) else isinstance(value, kind)
    if not fine:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise ValueError(f"{_called(name)} is {shown}, and has to be {_WORDS.get(kind, 'null')}")
    return value


def _inside(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _called(name: str) -> str:
    return f"'{name}'" if name else "it"
