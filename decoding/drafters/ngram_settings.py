"""Settings of drafting from the text itself.

Imports no torch, so that a configuration can be read without it.
"""

from typing import Annotated

from pydantic import Field

from nde_talf.decoding.common.arguments import Proper
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import Few, Number, settings

LONGEST = 64
"""Largest `max_size`: every size up to it is indexed."""


@settings("ngram")
class NgramConfig:
    """Settings of the look-up of continuations in the text, and of the size of their tree."""

    min_size: Annotated[int, Field(ge=1, le=LONGEST)] = 1
    """Tokens that the end of the text must have in common with an earlier part, or nothing is
    drafted.
    """
    max_size: Annotated[int, Field(ge=1, le=LONGEST)] = 4
    """Longest end of the text that is looked up; the longest that is found counts."""
    matches: Number = 16
    """Number of earlier parts that are looked at, the latest first."""
    nodes: Few = 8
    """Maximum number of drafted tokens in a tree of picked tokens."""
    depth: Few = 8
    """Maximum length of its paths."""
    threshold: Proper = 0.1
    """Tokens less likely to be accepted than this, by what was accepted in this text so far, are
    not drafted.
    """

    def __post_init__(self) -> None:
        if self.min_size > self.max_size:
            raise UserError(
                f"ngram.min_size={self.min_size} is larger than ngram.max_size={self.max_size}:"
                " lower it."
            )
