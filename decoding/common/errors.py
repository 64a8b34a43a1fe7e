"""Errors and notices for the person who runs a command.

A `UserError` means "you can fix this". Its message is one paragraph that names the key or the file
and says what to do. The command lines print it without a traceback and exit with status 1.
"""

import re

_SECRETS = (
    (re.compile(r"(?<=://)[^/\s'\"]+@"), "***@"),
    (re.compile(r"\bhf_\w{8,}"), "hf_***"),
    (re.compile(r"(?i)([?&][^=&\s]*(?:key|password|secret|signature|token)=)[^&\s'\"]+"), r"\1***"),
)
"""User and password of an address, tokens of the hub, and an address's parameters that sign it."""


def masked(text: str) -> str:
    """Return a text without the secrets that addresses and tokens in it hold."""
    for secret, mask in _SECRETS:
        text = secret.sub(mask, text)
    return text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UserError(Exception):
    """Bad input or a bad environment, described for who can change it; secrets are masked."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class ArgumentError(UserError, TypeError, ValueError):
    """A wrong argument of a call in Python: what was given, and what is expected."""


class Advice(UserWarning):
    """Something that works but is probably not what was meant. One sentence, shown once."""
