"""How a test says that bad input is refused."""

import pytest

from nde_talf import UserError


def refusal(words: str | None = None):
    """A block that ends in a sentence for the user; words: a regular expression for what it names."""
    return pytest.raises(UserError, match=words)
