"""Which text and which prompts: the settings of `data.*`. Imports no library that reads data."""

from dataclasses import dataclass, field

STANDARD_LIBRARY = "stdlib"
"""The `source` that every machine has: the sources of the running Python's standard library."""
FILE_FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""File suffix -> the builder of `datasets.load_dataset` that reads it."""


@dataclass
class Corpus:
    """One corpus of a mixture. source, split: as data.source and data.split. template: a Python format string over the row's
    columns. characters: how much of it to use (null: all). draft_share: share of its documents that a draft trained here
    learns from; one that knows little of a domain is accepted less there."""

    source: str = STANDARD_LIBRARY
    split: str = "train"
    template: str = "{text}"
    characters: int | None = None
    draft_share: float = 1.0


@dataclass
class PromptPart:
    """One source of a set, with the template of its rows."""

    source: str
    template: str


@dataclass
class PromptSet:
    """A set of prompts. source: hub name (with `:configuration`), or a local .jsonl, .json, .parquet, .csv or .txt file; split.
    template: a Python format string over the row's columns ("{question}", "{translation[en]}"); of a conversation or a list
    of turns its first human turn counts. kind: domain it is reported under (null: the set's name). chat: apply the
    tokenizer's chat template, as one user turn. cut: keep the first `cut` tokens (texts to continue; null keeps all).
    longest: prompts of more tokens are left out. streaming: read only the first rows of a huge set. parts: several sources
    in place of one, taken in equal parts."""

    source: str | None = None
    split: str = "train"
    template: str = "{text}"
    kind: str | None = None
    chat: bool = False
    cut: int | None = None
    longest: int = 1024
    streaming: bool = False
    parts: list[PromptPart] = field(default_factory=list)
