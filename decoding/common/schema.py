"""What a setting may be, declared beside its field, and the one function that checks it.

Imports no torch.

Example of two settings, and of what a user reads who gives `traces.stride=0`:

    @dataclass
    class TracesConfig:
        stride: int = number(16, 1, 1_000_000)
        dtype: str = choice("float32", DTYPES)

    traces.stride=0: it must be a number from 1 to 1000000, such as traces.stride=16.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from math import inf
from typing import Any, get_args, get_origin, get_type_hints

from nde_talf.decoding.common.errors import UserError

ALLOWED = "allowed"
"""The key of a field's metadata that holds its `Allowed`."""
OPTIONS = "options"
"""The key of a field's metadata that holds, by name, the dataclasses of which the field holds one.
"""
SEED = 2**32 - 1
"""Largest seed that every library takes."""
MANY = 1_000_000_000
"""Largest number of things that nobody has to count, such as steps."""
_UNSET = "???"
"""What OmegaConf has for a value that is still to be given."""


@dataclass(frozen=True)
class Allowed:
    """What a field may hold: itself, every entry of its list, or every name of its dictionary.

    None is always allowed here.

    Attributes:
        low, high: ends of a range of numbers.
        above, below: whether `low`, or `high`, is itself outside.
        names: the texts to choose from.
        pattern: what a text has to match in full, and `words` that say so.
        entries: smallest and largest number of entries of a list or dictionary.
        example: a value for the message, where the field has no default.
    """

    low: float = -inf
    high: float = inf
    above: bool = False
    below: bool = False
    names: Iterable[str] | None = None
    pattern: str | None = None
    words: str = ""
    entries: tuple[int, float] = (0, inf)
    example: Any = None

    def fits(self, value: Any) -> bool:
        """Whether one number or text is allowed. NaN and infinity are not."""
        if isinstance(value, bool) or value is None or value == _UNSET:
            return True
        if isinstance(value, (int, float)):
            inside = self.low <= value <= self.high and abs(value) < inf
            return (
                inside
                and not (self.above and value == self.low)
                and not (self.below and value == self.high)
            )
        if self.names is not None:
            return value in self.names
        return (
            not isinstance(value, str)
            or self.pattern is None
            or re.fullmatch(self.pattern, value, re.DOTALL) is not None
        )

    def __str__(self) -> str:
        """For example "a number above 0, at most 1"."""
        if self.names is not None:
            return f"one of {', '.join(self.names)}"
        if self.pattern is not None:
            return self.words
        low, high = _shown(self.low), _shown(self.high)
        if not (self.above or self.below):
            return (
                f"a number from {low} to {high}"
                if self.high < inf
                else f"a number of at least {low}"
            )
        begin = f"above {low}" if self.above else f"of at least {low}"
        return f"a number {begin} and {'below' if self.below else 'at most'} {high}"


_PART = r"[^/\0]{0,255}"
TEXT = Allowed(
    pattern=rf"{_PART}(/{_PART}){{0,63}}",
    words="a text of at most 255 characters between slashes, without NUL",
)
"""Any text field without bounds of its own: a name, or a path that a file system can hold."""
LONG_TEXT = Allowed(
    pattern=r"[^\0]{0,1000000}", words="a text without NUL, of at most a million characters"
)


def number(
    default: Any,
    low: float,
    high: float,
    *,
    above: bool = False,
    below: bool = False,
    **others: Any,
) -> Any:
    """A field of a number, or of a list of numbers.

    All arguments but the default are of `Allowed`.
    """
    return allowed(default, Allowed(low, high, above, below, **others))


def choice(default: Any, names: Iterable[str], **others: Any) -> Any:
    """A field of one of `names`, a list of them, or a dictionary with such keys."""
    return allowed(default, Allowed(names=names, **others))


def allowed(default: Any, own: Allowed) -> Any:
    """A field with its bounds. A list or dictionary as `default` is copied for every instance."""
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata={ALLOWED: own})
    return field(default=default, metadata={ALLOWED: own})


def check_fields(config: Any, group: str = "", schema: type | None = None) -> None:
    """Check all fields of a settings dataclass, those of dataclasses inside it too.

    Args:
        config: the dataclass, or the dictionary that it will be made from.
        group: what keys begin with in messages, such as "traces".
        schema: the dataclass of a dictionary.

    Raises:
        UserError: a value is not allowed. The message names the key, the value, what is allowed,
            and an example.
    """
    schema = schema or type(config)
    read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name)
    types = get_type_hints(schema)
    for each in fields(schema):
        value, key = read(each.name), f"{group}.{each.name}" if group else each.name
        parts = types[each.name], *get_args(types[each.name])
        inner: type | None = next(
            (own for own in parts if isinstance(own, type) and is_dataclass(own)), None
        )
        options = each.metadata.get(OPTIONS, {})
        if options:
            inner = options.get(value.get("name")) if isinstance(value, Mapping) else type(value)
        if inner is None or value is None:
            default = (
                each.default_factory() if each.default_factory is not MISSING else each.default
            )
            _check(each.metadata.get(ALLOWED, TEXT), value, key, default)
        elif get_origin(types[each.name]) in (dict, list):
            named = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, own in named:
                _check(TEXT, str(name), f"{key}.NAME", MISSING)
                check_fields(
                    own, f"{key}.{name}" if isinstance(value, Mapping) else f"{key}[{name}]", inner
                )
        elif is_dataclass(inner):
            check_fields(value, key, inner)


def _check(own: Allowed, value: Any, key: str, default: Any) -> None:
    """Raise UserError for a value, or an entry of it, that is not allowed."""
    several = isinstance(value, (list, tuple, Mapping))
    example = own.example if own.example is not None else default
    such = "" if example in (None, MISSING, _UNSET) else f", such as {key}={_cut(example)}"
    if several and not own.entries[0] <= len(value) <= own.entries[1]:
        low, high = own.entries
        count = low if low == high else f"at least {low}" if len(value) < low else f"at most {high}"
        raise UserError(f"{key}={_cut(value)}: give {count} of them, each {own}{such}.")
    for entry in value if several else [value]:
        if own.fits(entry):
            continue
        if own.names is not None and isinstance(entry, str):
            fault = (
                f"{key}: '{_cut(entry)}' is not known"
                if several
                else f"{key}={_cut(entry)}: there is none"
            )
            raise UserError(f"{fault}; choose from {', '.join(own.names)}.")
        raise UserError(f"{key}={_cut(value)}: {'each' if several else 'it'} must be {own}{such}.")


def _shown(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _cut(value: Any) -> str:
    """A value as a command line gives it; a long one is cut."""
    text = (
        str(value).replace("', '", ",").replace("['", "[").replace("']", "]")
        if isinstance(value, list)
        else str(value)
    )
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"
