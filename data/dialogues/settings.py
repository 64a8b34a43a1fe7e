"""Settings of `dialogues.*`: the dialogues that a head learns from.

Imports no library that reads data.
"""

from dataclasses import field
from typing import Annotated, Any

from pydantic import Field

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import (
    MANY,
    Amount,
    LongText,
    Part,
    Place,
    Share,
    Text,
    Tokens,
    settings,
)
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting

KEY = "dialogues"


@settings("dialogues")
class DialogueConfig:
    """The dialogues that a draft head is trained on, in place of the pair's text."""

    source: Place | None = None
    """A .jsonl, .json or .parquet file, or a hub dataset; null: no dialogues, the head learns from
    the pair's text.
    """
    split: Text = "train"
    """Split of a hub dataset."""
    column: Text | None = None
    """Column with the list of turns; null: the first of conversations, conversation, messages and
    turns that exists.
    """
    user: LongText | None = None
    """For sets of single questions: format string over a row's columns that gives the question,
    such as "{question}".
    """
    assistant: LongText | None = None
    """Format string that gives the answer to `user`."""
    count: Annotated[int, Field(ge=2, le=MANY)] | None = None
    """Number of dialogues, chosen at random; null: all."""
    held_out: Part = 0.05
    """Fraction of the dialogues that the held-out figures are computed on."""
    length: Tokens = 2048
    """Tokens in a row, and of the longest document."""
    chat_template: LongText | None = None
    """Jinja text in place of the tokenizer's own chat template."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, such as {enable_thinking: false}."""
    regenerate: bool = False
    """Response regeneration: replace every answer by one that the target generates."""
    temperature: Amount = 1.0
    """With regenerate: temperature of the answers."""
    top_p: Share = 1.0
    """With regenerate: top-p of the answers."""
    new_tokens: Tokens = 512
    """With regenerate: maximum number of tokens of an answer."""

    def __post_init__(self) -> None:
        if self.regenerate and self.new_tokens >= self.length:
            raise UserError(
                f"{KEY}.new_tokens={self.new_tokens} leaves a question no room in"
                f" {KEY}.length={self.length}: lower it, or raise {KEY}.length."
            )

    @property
    def setting(self) -> SamplingSetting:
        """Sampling setting of the answers."""
        return SamplingSetting(self.temperature, self.top_p)
