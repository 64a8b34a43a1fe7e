"""Errors and notices for the person who runs a command.

A `UserError` means "you can fix this". Its message is one paragraph that names the key or the file
and says what to do. The command lines print it without a traceback and exit with status 1.
"""

import errno
import re

_SECRETS = (
    (re.compile(r"(?<=://)[^/\s'\"]+@"), "***@"),
    (re.compile(r"\bhf_\w{8,}"), "hf_***"),
    (re.compile(r"(?i)([?&][^=&\s]*(?:key|password|secret|signature|token)=)[^&\s'\"]+"), r"\1***"),
)
"""User and password of an address, tokens of the hub, and an address's parameters that sign it."""
_SHORT = (
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "failed to allocate",
    "bad_alloc",
    "_status_alloc_failed",  # of CUDA's libraries, which allocate by themselves
    "can't start new thread",  # its stack finds no memory
)
_SHORT_ONEDNN = re.compile(
    "could not (create a primitive(?! descriptor)|execute a primitive|create a memory object)"
)
"""Messages of oneDNN about a failed allocation, and no others."""


def masked(text: str) -> str:
    """Return a text without the secrets that addresses and tokens in it hold."""
    for secret, mask in _SECRETS:
        text = secret.sub(mask, text)
    return text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def memory_is_short(error: BaseException | None) -> bool:
    """Return True if an error, or what caused it, was a lack of memory."""
    return error is not None and (
        lacks_memory(error) or memory_is_short(error.__cause__ or error.__context__)
    )


def lacks_memory(error: BaseException) -> bool:
    """Return True if the error itself is a lack of memory; libraries word it differently."""
    short = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    words = str(error).lower()
    return short or bool(_SHORT_ONEDNN.search(words)) or any(each in words for each in _SHORT)


class UserError(Exception):
    """Bad input or a bad environment, described for who can change it; secrets are masked."""

    status = 1
    """Exit status of a command that ends with it."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class ArgumentError(UserError, TypeError, ValueError):
    """A wrong argument of a call in Python: what was given, and what is expected."""


class Advice(UserWarning):
    """Something that works but is probably not what was meant. One sentence, shown once."""
