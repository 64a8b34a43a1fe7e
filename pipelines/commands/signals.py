"""Ctrl-C and SIGTERM end a command with one line, at any moment, and with exit status 130 or 143.

Imports nothing slow.

At first nothing is to be undone, so the process ends at once, imports included. Once a stage may be
at work they are exceptions, so that it notes how far it came.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

SIGNALS = signal.SIGINT, signal.SIGTERM
_came: list[int] = []


def leave_at_once() -> None:
    """End the process at once when a signal comes, from now on.

    For the time before any work, and after it.
    """
    _handle(_leave)


def raise_signals() -> None:
    """Raise KeyboardInterrupt or SystemExit at a signal from now on, and remember it."""
    _handle(_raise)


def raise_swallowed() -> None:
    """Raise SystemExit if a signal came.

    A library that is just finishing something may swallow the first exception.
    """
    if _came:
        raise SystemExit(status())


def interrupted(error: BaseException) -> bool:
    """Return True if an exception is due to a signal.

    Lightning turns Ctrl-C into an exit with status 1, others into errors.
    """
    return bool(_came) or isinstance(error, (KeyboardInterrupt, SystemExit))


def status() -> int:
    """The exit status of a command that was interrupted: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + (_came[0] if _came else signal.SIGINT)


def _handle(handler: object) -> None:
    for each in SIGNALS:
        if (
            signal.getsignal(each) is not signal.SIG_IGN
        ):  # as a shell wants it for commands in the background
            signal.signal(each, handler)  # type: ignore[arg-type]


def _raise(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(status())


def _leave(number: int, frame: FrameType | None) -> None:
    with suppress(Exception):
        sys.stdout.flush()
        os.write(2, b"\nInterrupted.\n")
    os._exit(128 + number)
