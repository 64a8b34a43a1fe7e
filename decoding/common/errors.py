"""The one exception that means "the user can mend this": its message is a paragraph that names the key or
file and says what to do. Entry points print it without a traceback and exit with status 1."""


class UserError(Exception):
    """Bad input or a bad environment, described for the person who can change it."""


class Advice(UserWarning):
    """Something that works and is probably not meant: said once, in one sentence."""
