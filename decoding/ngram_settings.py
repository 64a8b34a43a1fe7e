"""Settings of drafting from the text itself. Imports no torch, so that a configuration can be read without it."""

from dataclasses import dataclass

from decoding.common.errors import UserError, check_minimum

LONGEST = 64
"""Largest `max_size`: every size up to it is indexed."""


@dataclass
class NgramConfig:
    """How continuations are looked up in prompt and text, and how large the tree of them is."""

    min_size: int = 1
    """Tokens that the end of the text must have in common with an earlier part, or nothing is drafted."""
    max_size: int = 4
    """Longest end of the text that is looked up; the longest that is found counts."""
    matches: int = 16
    """How many of the earlier parts, the latest first, are looked at."""
    nodes: int = 8
    """Maximum number of drafted tokens in a tree of picked tokens."""
    depth: int = 8
    """Maximum length of its paths."""
    threshold: float = 0.1
    """Tokens less likely to be accepted than this, by what was accepted in this text so far, are not drafted."""
    min_rate: float = 0.0
    """With another draft beside it: how likely the next token must be accepted for the n-gram to draft in its place."""

    def __post_init__(self) -> None:
        check_minimum(self, "ngram", min_size=1, max_size=1, matches=1, nodes=1, depth=1)
        if self.max_size > LONGEST:
            raise UserError(f"ngram.max_size={self.max_size}: it must be at most {LONGEST}.")
        if self.min_size > self.max_size:
            raise UserError(f"ngram.min_size={self.min_size} is larger than ngram.max_size={self.max_size}: lower it.")
        for name in ("threshold", "min_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"ngram.{name}={getattr(self, name)}: it must lie in [0, 1).")
