"""Which dialogues a head learns from: the settings of `dialogues.*`. Imports no library that reads data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.text.settings import FILE_FORMATS
from decoding.common.errors import UserError
from decoding.setting import SamplingSetting

KEY = "dialogues"


@dataclass
class DialogueConfig:
    """Dialogues to train a head on, in place of the pair's rows. source: a .jsonl, .json or .parquet file or a hub data set
    (null: the pair's rows); split. column: the list of turns (null: the first of COLUMNS that is there). user, assistant:
    format strings over a row's columns instead, for sets of single instructions. count: how many dialogues, drawn at random
    (null: all). held_out: share of the dialogues that the figures are computed on. length: tokens in a row, and of the longest
    document. chat_template: Jinja text in place of the tokenizer's own. template_options: passed to the template, such as
    {enable_thinking: false} or {date_string: "26 Jul 2024"}. regenerate: the target answers every human turn itself, with
    temperature, top_p and up to new_tokens tokens an answer; shard: dialogues answered together, and lost at most by a kill."""

    source: str | None = None
    split: str = "train"
    column: str | None = None
    user: str | None = None
    assistant: str | None = None
    count: int | None = None
    held_out: float = 0.05
    length: int = 2048
    chat_template: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    regenerate: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    new_tokens: int = 512
    shard: int = 64


def check_dialogue_config(config: DialogueConfig) -> None:
    """Raise UserError for numbers that make no sense, and for a file that is not there."""
    for name in ("length", "new_tokens", "shard"):
        if getattr(config, name) < 1:
            raise UserError(f"{KEY}.{name}={getattr(config, name)}: it must be at least 1.")
    if config.count is not None and config.count < 2:
        raise UserError(f"{KEY}.count={config.count}: at least one dialogue to learn from and one held out are needed.")
    if not 0 < config.held_out < 1:
        raise UserError(f"{KEY}.held_out={config.held_out}: it is a share between 0 and 1.")
    if config.regenerate:
        SamplingSetting(config.temperature, config.top_p)  # says what is wrong with them
        if config.new_tokens >= config.length:
            raise UserError(
                f"{KEY}.new_tokens={config.new_tokens} leaves a question no room in {KEY}.length={config.length}: lower it, or "
                f"raise {KEY}.length."
            )
    source = config.source or ""
    if Path(source).suffix in FILE_FORMATS and "://" not in source and not Path(source).expanduser().is_file():
        raise UserError(f"{KEY}.source={source}: there is no such file (relative paths start at the working folder).")
