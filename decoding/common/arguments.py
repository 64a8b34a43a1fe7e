"""Arguments of the API's calls, checked against their annotations at one door.

Example, and what a user reads who calls `Salf(nodes=0)`:

    @checked
    def __init__(self, nodes: Positive = 60): ...

    nodes=0: it should be greater than or equal to 1.
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, wraps
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

from nde_talf.decoding.common.errors import ArgumentError

C = TypeVar("C", bound=Callable[..., Any])

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Proper = Annotated[float, Field(ge=0, lt=1)]
"""A probability below 1."""
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
_INSTANCE: Any = InstanceOf
_SHOULD = "Input should be "


def checked(called: C) -> C:
    """Check and convert the arguments of a function, or of a dataclass's fields.

    A call raises ArgumentError, naming the argument, for a value that its annotation does not
    allow.
    """
    given: Any = called
    if isinstance(called, type):
        given.__init__ = checked(given.__init__)
        return called
    signature = inspect.signature(called)

    @cache
    def adapters() -> dict[str, TypeAdapter[Any]]:
        asked = {key: hint for key, hint in given.__annotations__.items() if key != "return"}
        scope = SimpleNamespace(__annotations__=asked)
        hints = get_type_hints(scope, given.__globals__, include_extras=True)
        return {key: _adapter(hint) for key, hint in hints.items()}

    @wraps(called)
    def call(*values: Any, **named: Any) -> Any:
        bound = signature.bind(*values, **named)
        for name in bound.arguments.keys() & adapters().keys():
            bound.arguments[name] = fitting(name, bound.arguments[name], adapters()[name])
        return called(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _adapter(hint: Any) -> TypeAdapter[Any]:
    configured = is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, tuple))
    return TypeAdapter(_instances(hint), config=None if configured else _ANY_CLASS)


def _instances(hint: Any) -> Any:
    """Ask for an instance where pydantic would make a dataclass of a dictionary."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(map(_instances, get_args(hint)))]  # noqa: UP007
    return _INSTANCE[hint] if is_dataclass(hint) else hint


def fitting(name: str, value: Any, adapter: TypeAdapter[Any]) -> Any:
    """Return `value` as `adapter` has it. Raises ArgumentError, naming the argument `name`."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    said = [fault["msg"].removeprefix("Value error, ") for fault in faults]
    kinds = [text.removeprefix(_SHOULD) for text in said if text.startswith(_SHOULD)]
    sentence = f"it should be {' or '.join(dict.fromkeys(kinds))}" if kinds else said[0]
    path = faults[0]["loc"] if len(faults) == 1 else ()
    given = repr(faults[0]["input"] if path else value).partition("\n")[0][:100]
    raise ArgumentError(f"{'.'.join([name, *map(str, path)])}={given}: {sentence}.")
