"""Errors and notices for the person who runs a command.

A `UserError` means "you can fix this". Its message is one paragraph that names the key or the file
and says what to do. The command lines print it without a traceback and exit with status 1.
"""


class UserError(Exception):
    """Bad input or a bad environment, described for the person who can change it."""


class Advice(UserWarning):
    """Something that works but is probably not what was meant. One sentence, shown once."""
