"""Bounds of policies' settings, told before anything is drafted."""

from itertools import pairwise

from decoding.errors import UserError


def require_positive(**settings: int) -> None:
    """Raise UserError, naming it, for a setting below 1."""
    for name, value in settings.items():
        if value < 1:
            raise UserError(f"{name}={value}: it must be at least 1.")


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
