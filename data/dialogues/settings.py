"""Which dialogues a head learns from: the settings of `dialogues.*`.

Imports no library that reads data.
"""

from dataclasses import dataclass, field
from typing import Any

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.schema import LONG_TEXT, MANY, allowed, check_fields, number
from nde_talf.decoding.setting import SamplingSetting

KEY = "dialogues"


@dataclass
class DialogueConfig:
    """The dialogues that a draft head is trained on, in place of the pair's text."""

    source: str | None = None
    """A .jsonl, .json or .parquet file, or a hub dataset; null: no dialogues, the head learns from
    the pair's text.
    """
    split: str = "train"
    """Split of a hub dataset."""
    column: str | None = None
    """Column with the list of turns; null: the first of conversations, conversation, messages and
    turns that exists.
    """
    user: str | None = allowed(None, LONG_TEXT)
    """For sets of single questions: format string over a row's columns that gives the question,
    such as "{question}".
    """
    assistant: str | None = allowed(None, LONG_TEXT)
    """Format string that gives the answer to `user`."""
    count: int | None = number(None, 2, MANY, example=1000)
    """Number of dialogues, chosen at random; null: all."""
    held_out: float = number(0.05, 0, 1, above=True, below=True)
    """Fraction of the dialogues that the held-out figures are computed on."""
    length: int = number(2048, 1, 10_000_000)
    """Tokens in a row, and of the longest document."""
    chat_template: str | None = allowed(None, LONG_TEXT)
    """Jinja text in place of the tokenizer's own chat template."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, such as {enable_thinking: false}."""
    regenerate: bool = False
    """Response regeneration: replace every answer by one that the target generates."""
    temperature: float = number(1.0, 0, 1e6)
    """With regenerate: temperature of the answers."""
    top_p: float = number(1.0, 0, 1, above=True)
    """With regenerate: top-p of the answers."""
    top_k: int = number(0, 0, MANY)
    """With regenerate: top-k of the answers; 0: off."""
    min_p: float = number(0.0, 0, 1)
    """With regenerate: min-p of the answers; 0: off."""
    new_tokens: int = number(512, 1, 10_000_000)
    """With regenerate: maximum number of tokens of an answer."""
    shard: int = number(64, 1, MANY)
    """With regenerate: dialogues answered together; an interrupted run loses at most one shard."""

    def __post_init__(self) -> None:
        check_fields(self, KEY)
        if self.regenerate:
            _ = self.setting
            if self.new_tokens >= self.length:
                raise UserError(
                    f"{KEY}.new_tokens={self.new_tokens} leaves a question no room in"
                    f" {KEY}.length={self.length}: lower it, or raise {KEY}.length."
                )

    @property
    def setting(self) -> SamplingSetting:
        """What the answers are sampled under.

        Raises UserError for values that cannot be sampled with.
        """
        return SamplingSetting(self.temperature, self.top_p, self.top_k, self.min_p)
