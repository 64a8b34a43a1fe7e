"""Settings of drafting from the text itself.

Imports no torch, so that a configuration can be read without it.
"""

from dataclasses import dataclass

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.schema import check_fields, number

LONGEST = 64
"""Largest `max_size`: every size up to it is indexed."""


@dataclass
class NgramConfig:
    """How continuations are looked up in prompt and text, and how large the tree of them is."""

    min_size: int = number(1, 1, LONGEST)
    """Tokens that the end of the text must have in common with an earlier part, or nothing is
    drafted.
    """
    max_size: int = number(4, 1, LONGEST)
    """Longest end of the text that is looked up; the longest that is found counts."""
    matches: int = number(16, 1, 1_000_000)
    """How many of the earlier parts, the latest first, are looked at."""
    nodes: int = number(8, 1, 10_000)
    """Maximum number of drafted tokens in a tree of picked tokens."""
    depth: int = number(8, 1, 10_000)
    """Maximum length of its paths."""
    threshold: float = number(0.1, 0, 1, below=True)
    """Tokens less likely to be accepted than this, by what was accepted in this text so far, are
    not drafted.
    """
    min_rate: float = number(0.0, 0, 1, below=True)
    """With another draft beside it: how likely the next token must be accepted for the n-gram to
    draft in its place.
    """

    def __post_init__(self) -> None:
        check_fields(self, "ngram")
        if self.min_size > self.max_size:
            raise UserError(
                f"ngram.min_size={self.min_size} is larger than ngram.max_size={self.max_size}:"
                " lower it."
            )
