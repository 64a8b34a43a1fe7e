"""Errors and notices for the person who runs a command, and the checks of settings that raise them.

A `UserError` means "you can fix this". Its message is one paragraph that names the key or the file and says what to do. The
command lines print it without a traceback and exit with status 1.
"""

from collections.abc import Iterable


class UserError(Exception):
    """Bad input or a bad environment, described for the person who can change it."""


class Advice(UserWarning):
    """Something that works but is probably not what was meant. One sentence, shown once."""


class RenamedWarning(FutureWarning):
    """A name of an earlier version was used. It is read for one version more."""


def check_minimum(config: object, group: str, **minima: float) -> None:
    """Check number fields of a settings dataclass; a field that is None passes.

    Example: `check_minimum(self, "traces", samples=2, stride=1)`.

    Raises:
        UserError: a field is below its minimum.
    """
    for name, minimum in minima.items():
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise UserError(f"{_key(group, name)}={value}: it must be at least {minimum}.")


def _key(group: str, name: str) -> str:
    return f"{group}.{name}" if group else name


def check_fraction(config: object, group: str, *names: str) -> None:
    """Raise UserError for a field that does not lie strictly between 0 and 1."""
    for name in names:
        if not 0 < getattr(config, name) < 1:
            raise UserError(f"{group}.{name}={getattr(config, name)}: it is a fraction between 0 and 1.")


def check_choice(config: object, group: str, **choices: Iterable[str]) -> None:
    """Check fields that hold one of a few names, or a list of such names.

    Example: `check_choice(self, "tracking", mode=("online", "offline", "disabled"))`.

    Raises:
        UserError: a name is not among the choices; the message lists them.
    """
    for field, known in choices.items():
        value, key = getattr(config, field), _key(group, field)
        for name in [value] if isinstance(value, str) else value or ():
            if name not in known:
                fault = f"{key}={name}: there is none" if name is value else f"{key}: '{name}' is not known"
                raise UserError(f"{fault}; choose from {', '.join(known)}.")


def check_numbers(config: object, group: str, count: int | None, *names: str) -> None:
    """Raise UserError for a list field that does not hold `count` numbers (None: one or more) of at least 1."""
    for name in names:
        values = getattr(config, name)
        if not values or min(values) < 1 or (count and len(values) != count):
            raise UserError(f"{group}.{name}={values}: it must be a list of {count or 'one or more'} numbers of at least 1.")
