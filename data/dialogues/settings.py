"""Which dialogues a head learns from: the settings of `dialogues.*`. Imports no library that reads data."""

from dataclasses import dataclass, field
from typing import Any

from decoding.common.errors import UserError, check_fraction, check_minimum
from decoding.setting import SamplingSetting

KEY = "dialogues"
ADDED_KEYS = ("dialogues.top_k", "dialogues.min_p")


@dataclass
class DialogueConfig:
    """The dialogues that a draft head is trained on, in place of the pair's text."""

    source: str | None = None
    """A .jsonl, .json or .parquet file, or a hub dataset; null: no dialogues, the head learns from the pair's text."""
    split: str = "train"
    """Split of a hub dataset."""
    column: str | None = None
    """Column with the list of turns; null: the first of conversations, conversation, messages and turns that exists."""
    user: str | None = None
    """For sets of single questions: format string over a row's columns that gives the question, such as "{question}"."""
    assistant: str | None = None
    """Format string that gives the answer to `user`."""
    count: int | None = None
    """Number of dialogues, chosen at random; null: all."""
    held_out: float = 0.05
    """Fraction of the dialogues that the held-out figures are computed on."""
    length: int = 2048
    """Tokens in a row, and of the longest document."""
    chat_template: str | None = None
    """Jinja text in place of the tokenizer's own chat template."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, such as {enable_thinking: false}."""
    regenerate: bool = False
    """Response regeneration: replace every answer by one that the target generates."""
    temperature: float = 1.0
    """With regenerate: temperature of the answers."""
    top_p: float = 1.0
    """With regenerate: top-p of the answers."""
    top_k: int = 0
    """With regenerate: top-k of the answers; 0: off."""
    min_p: float = 0.0
    """With regenerate: min-p of the answers; 0: off."""
    new_tokens: int = 512
    """With regenerate: maximum number of tokens of an answer."""
    shard: int = 64
    """With regenerate: dialogues answered together; an interrupted run loses at most one shard."""

    def __post_init__(self) -> None:
        check_minimum(self, KEY, length=1, new_tokens=1, shard=1)
        if self.count is not None and self.count < 2:
            raise UserError(f"{KEY}.count={self.count}: at least one dialogue to learn from and one held out are needed.")
        check_fraction(self, KEY, "held_out")
        if self.regenerate:
            _ = self.setting
            if self.new_tokens >= self.length:
                raise UserError(
                    f"{KEY}.new_tokens={self.new_tokens} leaves a question no room in {KEY}.length={self.length}: lower it, or "
                    f"raise {KEY}.length."
                )

    @property
    def setting(self) -> SamplingSetting:
        """What the answers are sampled under. Raises UserError for values that cannot be sampled with."""
        return SamplingSetting(self.temperature, self.top_p, self.top_k, self.min_p)
