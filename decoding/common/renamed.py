"""Old names that go with the next version: they work, and say what they are called now."""

import warnings
from collections.abc import Callable
from typing import Any

from nde_talf.decoding.common.errors import RenamedWarning


def notice(old: str, new: str, level: int = 3) -> None:
    """Warn the caller's caller that `old` is called `new` now."""
    warnings.warn(
        f"{old} is called {new} now; the old name goes with the next version.",
        RenamedWarning,
        level,
    )


def renamed(name: str, old: str) -> Callable[..., Any]:
    """A method that calls the one called `name`."""

    def method(self: Any, *arguments: Any) -> Any:
        notice(old, name)
        return getattr(self, name)(*arguments)

    return method


def renamed_attribute(name: str, old: str) -> property:
    """A property that reads and sets the attribute called `name`."""

    def read(self: Any) -> Any:
        notice(old, name)
        return getattr(self, name)

    def write(self: Any, value: Any) -> None:
        notice(old, name)
        setattr(self, name, value)

    return property(read, write)
