"""Settings of `data.*`: text and prompts. Imports no library that reads data."""

import math
import re
from dataclasses import field
from typing import Annotated

from pydantic import Field

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import (
    MANY,
    Count,
    Fraction,
    LongText,
    Part,
    Place,
    Text,
    Tokens,
    settings,
)
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting

STANDARD_LIBRARY = "stdlib"
"""The `source` of Python code that every machine has: the sources of the running Python's standard
library.
"""
ANSWERS = "answers"
"""The `source` of text that the target writes after the prompts."""
SELF = "self"
"""The `source` of text that the target writes without any data."""
SELF_MADE = SamplingSetting(1.0, 0.9)
"""Sampling setting of users' turns that a target writes, and of a base model's texts."""
BUILT_IN = {
    STANDARD_LIBRARY: "Python code",
    "pydoc": "Python's manual",
    "arithmetic": "made-up sums",
    "tables": "made-up tables",
}
"""Sources that every machine has: the standard library; the manual's topics, as `help()` shows
them; text that `nde_talf.data.text.generated` makes.
"""
FILE_FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
"""File suffix -> the builder of `datasets.load_dataset` that reads it."""


def is_hub_name(name: str) -> bool:
    """Tell whether this may be a name on the hub, such as openai/gsm8k, and not a path.

    It has at most one slash, and begins with a letter, a digit or an underscore.
    """
    return re.fullmatch(r"\w[\w.-]{0,95}(/[\w.-]{1,96})?", name, re.ASCII) is not None


@settings()
class Corpus:
    """One corpus of a mixture."""

    source: Place | None = None
    """As data.source: stdlib, pydoc, arithmetic, tables, a file, or a hub dataset."""
    split: Text = "train"
    """Split of a hub dataset."""
    template: LongText = "{text}"
    """Format string over a row's columns, such as "{question}\\n{answer}"."""
    characters: Annotated[int, Field(ge=1, le=1e15)] | None = None
    """Characters of the corpus to use; null: all."""
    draft_fraction: Fraction = 1.0
    """Fraction of the documents that a draft trained here learns from; with less its drafts are
    accepted less often there.
    """


@settings()
class PromptPart:
    """One source of a prompt set, with the template of its rows."""

    source: Place
    """A local file, or a hub dataset with its configuration after a colon."""
    template: LongText
    """Format string over a row's columns."""


@settings()
class PromptSet:
    """A set of ready-made prompts."""

    source: Place | None = None
    """A .jsonl, .json, .parquet, .csv or .txt file, or a hub dataset with its configuration after a
    colon.
    """
    split: Text = "train"
    """Split of a hub dataset."""
    template: LongText | None = "{text}"
    """Format string over a row's columns ("{question}", "{translation[en]}"). A column of turns
    alone ("{messages}") gives the conversation up to its last question, and of questions without
    answers the first. null: recognised by the columns' names.
    """
    kind: Text | None = None
    """Domain that the prompts are reported under; null: the set's name."""
    chat: bool | None = False
    """Put the prompt into the tokenizer's chat template, with the row's system turn.
    null: if it has one.
    """
    cut: Count | None = None
    """Keep the first `cut` tokens, for texts to continue; null: all tokens."""
    max_tokens: Count = 1024
    """Leave out prompts of more tokens."""
    shorten: bool = False
    """Cut longer prompts instead, after a word."""
    streaming: bool = False
    """Read only the first rows of a large set, without downloading all of it."""
    parts: list[PromptPart] = field(default_factory=list)
    """Several sources in place of one, used in equal parts."""


@settings("data.self_made")
class SelfMadeConfig:
    """With data=self: text that the target writes without any data."""

    count: Annotated[int, Field(ge=2, le=MANY)] = 1000
    """Dialogues that a chat model makes, or texts that a base model writes, to learn from."""
    tokens: Tokens | None = None
    """Tokens of a user's turn or a text, at most; null: 128 of a turn, model.length of a text."""


@settings("data")
class DataConfig:
    """The text that the pair learns from, and the prompts that are traced and decoded."""

    source: Place = STANDARD_LIBRARY
    """stdlib (Python's own sources), pydoc (its manual), arithmetic or tables (text made by this
    project), a .txt, .jsonl or .parquet file, a folder of such, or a hub dataset; answers: what the
    target writes after the prompts of data.sets; self: what it writes without any.
    """
    column: Text = "text"
    """Column of the source that holds the text."""
    split: Text = "train"
    """Split of a hub dataset."""
    mix: dict[str, Corpus] = field(default_factory=dict)
    """Several corpora in place of the source, by domain."""
    held_out: Part = 0.12
    """Fraction of the documents that prompts and held-out figures come from."""
    sets: dict[str, PromptSet] = field(default_factory=dict)
    """Ready-made prompts by set; without any, prompts are cut from the held-out documents."""
    answers: Annotated[int, Field(ge=4, le=MANY)] | None = None
    """With source=answers: texts that the target writes to learn from; null: 256. A quarter of the
    number is written to hold out.
    """
    answer_tokens: Tokens = 128
    """Tokens of such a text, at most."""
    self_made: SelfMadeConfig = field(default_factory=SelfMadeConfig)
    """With source=self: how much is written, and how."""
    prompt_count: Annotated[int, Field(ge=2, le=MANY)] = 120
    """Number of prompts, those to trace and those to decode together."""
    test_fraction: Part = 1 / 3
    """Fraction of the prompts that only the evaluation decodes; the others are traced."""
    prompt_tokens: Annotated[list[Tokens], Field(min_length=2, max_length=2)] = field(
        default_factory=lambda: [32, 96]
    )
    """Shortest and longest prompt that is cut from a document, in tokens."""

    def __post_init__(self) -> None:
        if self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise UserError(f"data.prompt_tokens={self.prompt_tokens}: the shortest comes first.")
        if self.source == ANSWERS and not self.sets:
            raise UserError(
                f"data.source={ANSWERS}: give the prompts too, as data=prompts.jsonl does."
            )
        if self.mix and self.source not in (STANDARD_LIBRARY, ANSWERS):
            raise UserError(
                f"data.source={self.source} is not read where data.mix names corpora"
                f" ({', '.join(self.mix)}). For this text alone add data=text; to have it in the"
                f" mixture, set +data.mix.mine.source={self.source}."
            )

    @property
    def test_prompts(self) -> int:
        """Number of prompts that only the evaluation decodes."""
        return math.ceil(self.prompt_count * self.test_fraction - 1e-9)
