"""Bounds of policies' settings, told before anything is drafted."""

from itertools import pairwise

from decoding.common.errors import UserError


def require_positive(**settings: int) -> None:
    """Raise UserError, naming it, for a setting below 1."""
    require_at_least(1, **settings)


def require_at_least(least: int, **settings: int) -> None:
    """Raise UserError, naming it, for a setting below `least`."""
    for name, value in settings.items():
        if value < least:
            raise UserError(f"{name}={value}: it must be at least {least}.")


def require_shares(**settings: float) -> None:
    """Raise UserError for a setting outside [0, 1)."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise UserError(f"{name}={value}: it must lie in [0, 1).")


def require_rising(**settings: float) -> None:
    """Raise UserError unless the settings rise in the order given."""
    pairs = list(settings.items())
    for (low, a), (high, b) in pairwise(pairs):
        if not a < b:
            raise UserError(f"{low}={a} and {high}={b}: {low} must be smaller than {high}.")
