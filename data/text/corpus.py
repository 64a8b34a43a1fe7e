"""Text to train on, as a dataset of named documents.

This module knows where text comes from (Python's own standard library, local files, Hugging Face datasets) and
how to hold documents out. It does not know tokenizers, models or prompts.
"""

import hashlib
import re
import sysconfig
from pathlib import Path

import datasets

from data.text.generated import documents as generated
from data.text.settings import BUILT_IN, FILE_FORMATS, STANDARD_LIBRARY
from decoding.common.errors import UserError

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
"""Folders of the standard library that are left out: tests, installed packages, and generated tables and manuals."""


LONGEST_DOCUMENT = 5_000
"""Characters of a plain-text document, at most; a longer file becomes several documents cut between paragraphs."""


def load_documents(source: str, column: str = "text", split: str = "train") -> datasets.Dataset:
    """The documents of `source`, in an order that does not change, with the columns `name` and `text`.

    Args:
        source: one of `BUILT_IN`, such as `"stdlib"`, a path to a .txt, .md, .jsonl, .json or .parquet file, or the name of a
            Hugging Face dataset, with its configuration after a colon if it has several (`"openai/gsm8k:main"`).
        column: the column that holds the text. Plain-text files have one only, `text`.
        split: the split of a Hugging Face dataset.

    Raises:
        UserError: the file is missing, the column is not there, or nothing is left to read.
    """
    if source in BUILT_IN:
        documents = {STANDARD_LIBRARY: _standard_library, "pydoc": _manual}.get(source, lambda: generated(source))()
    else:
        table = load_table(source, split)
        if Path(source).suffix in (".txt", ".md"):
            documents = _blocks("\n".join(table["text"]), Path(source).name)
        else:
            documents = _rows(table, column, source)
    if not documents:
        raise UserError(
            f"The corpus source {source!r} holds no text: every document in it is empty. Choose another source, "
            "or the column that holds the text."
        )
    return datasets.Dataset.from_dict({"name": [name for name, _ in documents], "text": [text for _, text in documents]})


def load_rows(source: str, split: str, first: int | None = None) -> datasets.Dataset | list[dict]:
    """The rows of a source, each a dictionary; with `first` only so many from its beginning, without reading all of it.

    Without `first` they stay on disk: a set may have millions of rows, of which few are looked at.
    """
    table = load_table(source, split, streaming=first is not None)
    return table if first is None else list(table.take(first))


def load_table(source: str, split: str = "train", streaming: bool = False) -> datasets.Dataset | datasets.IterableDataset:
    """The rows of a file (local, or of a hub repository as `hf://datasets/...`) or of a Hugging Face dataset, with whatever
    columns they have.

    Raises:
        UserError: the file does not exist or cannot be read, or no dataset of that name can be loaded.
    """
    path = Path(source).expanduser()
    if path.suffix in FILE_FORMATS:
        if source.startswith("hf://"):
            path = source
        elif not path.is_file():
            raise UserError(f"There is no file {source!r}. Correct the path (relative paths start at the working folder).")
        elif path.stat().st_size == 0:
            raise UserError(f"The file {source!r} is empty. Choose a file that holds text.")
        builder, arguments = FILE_FORMATS[Path(source).suffix], {"data_files": str(path), "split": "train"}
    elif path.exists():
        raise UserError(f"Cannot tell the format of {source!r}: its name should end with one of {', '.join(FILE_FORMATS)}.")
    else:
        builder, _, configuration = source.partition(":")
        arguments = {"name": configuration or None, "split": split}
    try:
        return datasets.load_dataset(builder, streaming=streaming, **arguments)
    except Exception as error:  # the builders raise many unrelated types, each for a source the user can change
        if "data_files" in arguments:
            causes: list[BaseException] = [error]
            while cause := causes[-1].__cause__ or causes[-1].__context__:
                causes.append(cause)
            said = next((text for text in map(str, causes) if " in row " in text), str(causes[-1]))
            raise UserError(f"{source!r} cannot be read as {builder}: {said}. Mend the file, or give another.") from error
        raise UserError(
            f"Cannot load {source!r} (split {split!r}): {error}. Give the path of a file that ends with one of "
            f"{', '.join(FILE_FORMATS)}, or the name of a Hugging Face dataset that this machine can reach."
        ) from error


def require_column(table: datasets.Dataset, column: str, source: str) -> None:
    """Raises a UserError that lists the columns of `table` when `column` is not one of them."""
    if column not in table.column_names:
        raise UserError(
            f"{source!r} has no column {column!r}; its columns are {', '.join(table.column_names)}. Set data.column to "
            "the one that holds the text."
        )


def split_documents(documents: datasets.Dataset, held_out: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Splits by document into (training, held out): about `held_out` (a fraction in (0, 1)) of the names are held out.

    A document's side depends on its name and `seed` alone, so it stays where it is when the corpus grows.

    Raises:
        UserError: one of the two sides is empty.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    for index, name in enumerate(documents["name"]):
        sides[by_hash(f"{seed}/{name}") < held_out].append(index)
    training, validation = sides
    if not training or not validation:
        raise UserError(
            f"Holding out {held_out} of {len(documents)} documents leaves {len(training)} to train on and "
            f"{len(validation)} held out; both need at least one. Change data.held_out or use a larger corpus."
        )
    return documents.select(training), documents.select(validation)


def by_hash(key: str) -> float:
    """A number in [0, 1), uniform over keys and the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64


def _standard_library() -> list[tuple[str, str]]:
    """The (relative path, source) of every readable module of the standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            documents.append((relative.as_posix(), text))
    return documents


def _manual() -> list[tuple[str, str]]:
    """The topics of Python's manual (those of `help("TOPICS")`), cut into documents."""
    from pydoc_data.topics import topics

    return [block for topic, text in sorted(topics.items()) for block in _blocks(text, topic)]


def _rows(table: datasets.Dataset, column: str, source: str) -> list[tuple[str, str]]:
    """One document per row; its name is the row's own `name` if there is one, else a hash of its text."""
    require_column(table, column, source)
    texts = ["" if text is None else str(text) for text in table[column]]
    if "name" in table.column_names:
        names = [str(name) for name in table["name"]]
    else:
        names = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    return [(name, text) for name, text in zip(names, texts, strict=True) if text.strip()]


def _blocks(text: str, name: str) -> list[tuple[str, str]]:
    """Cuts a plain text between paragraphs into documents of at most about LONGEST_DOCUMENT characters."""
    blocks: list[str] = []
    size = LONGEST_DOCUMENT
    for paragraph in re.split(r"\n[ \t]*\n", text):
        if not paragraph.strip():
            continue
        if size + len(paragraph) > LONGEST_DOCUMENT:
            blocks.append(paragraph)
            size = len(paragraph)
        else:
            blocks[-1] += "\n\n" + paragraph
            size += len(paragraph)
    return [(f"{name}#{index}", block) for index, block in enumerate(blocks)]
