"""JSON against a declared type: an annotation says what a file has to hold.

`typed([1, 2.5], list[float])` is `[1.0, 2.5]`. `typed({"rows": "4"}, Shard)`, where `Shard` is a
TypedDict or a dataclass with an integer field `rows`, raises `ValueError: rows: it should be a
valid integer`. A TypedDict comes from typing_extensions, as Python 3.11 needs it for pydantic.
"""

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of an annotation or a class, which is made once."""
    return TypeAdapter(kind)


def typed(value: Any, kind: Any) -> Any:
    """Return a value, as json.loads returned it, as a `kind`.

    Lists become tuples and objects become dataclasses where `kind` says so.

    Raises:
        ValueError: it is not one. The message names the first part that is not.
    """
    try:
        return adapter(kind).validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = ".".join(map(str, fault["loc"])) or "it"
        sentence = fault["msg"].removeprefix("Value error, ").replace("Input", "it")
        raise ValueError(f"{name}: {sentence}") from None
