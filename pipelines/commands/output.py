"""Standard output and errors that never end the work: closed, full, or of few letters.

Imports nothing slow.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class Steady(FileIO):
    """A stream that leads nowhere once it cannot be written to.

    lost: why, after that.
    """

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write `data`, as far as anybody reads it."""
        try:
            return super().write(data) or 0
        except OSError as error:
            self.lost = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


@contextmanager
def steady() -> Iterator[None]:
    """Make both streams steady; at the end exit with status 1 if what was printed was lost.

    Letters that a stream cannot hold become question marks. Descriptors that were closed are taken,
    so that no file gets their numbers.
    """
    while os.open(os.devnull, os.O_RDWR) < 3:
        pass
    raw = [Steady(number, "w", closefd=False) for number in (1, 2)]
    if sys.stdout is sys.__stdout__:  # a test or a notebook has its own
        streams: Any = zip(raw, (sys.stdout, sys.stderr), strict=True)
        sys.stdout, sys.stderr = (
            TextIOWrapper(BufferedWriter(each), old and old.encoding, "replace", "\n", True)
            for each, old in streams
        )
    ended = None
    try:
        yield
    except SystemExit as error:  # of --help, say
        if error.code:
            raise
        ended = error
    sys.stdout.flush()
    if lost := raw[0].lost:
        if not isinstance(lost, BrokenPipeError):  # `| head` has read enough
            print(f"standard output was lost: {lost.strerror}", file=sys.stderr)
        sys.exit(1)
    if ended:
        raise ended
