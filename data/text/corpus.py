"""Text to train on, as a dataset of named documents.

This module knows where text comes from (Python's own standard library, local files, Hugging Face
datasets) and how to hold documents out. It does not know tokenizers, models or prompts.
"""

import glob
import hashlib
import json
import re
import sysconfig
from pathlib import Path

import datasets
import numpy as np

from nde_talf.data.text.generated import documents as generated
from nde_talf.data.text.settings import BUILT_IN, FILE_FORMATS, STANDARD_LIBRARY, is_hub_name
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import memory_is_short, unreadable

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
"""Folders of the standard library that are left out: tests, installed packages, and generated
tables and manuals.
"""


LONGEST_DOCUMENT = 5_000
"""Characters of a plain-text document, at most; a longer file becomes several documents cut between
paragraphs.
"""
DEEPEST = 200
"""Levels of nesting in JSON.

The libraries that read it recurse, and end the process somewhere beyond.
"""


def load_documents(source: str, column: str = "text", split: str = "train") -> datasets.Dataset:
    """The documents of `source`, in an order that does not change, with the columns `name` and
    `text`.

    Args:
        source: one of `BUILT_IN`, such as `"stdlib"`, a path to a .txt, .md, .jsonl, .json or
            .parquet file, or the name of a Hugging Face dataset, with its configuration after a
            colon if it has several (`"openai/gsm8k:main"`).
        column: the column that holds the text. Plain-text files have one only, `text`.
        split: the split of a Hugging Face dataset.

    Raises:
        UserError: the file is missing, the column is not there, or nothing is left to read.
    """
    if source in BUILT_IN:
        documents = {STANDARD_LIBRARY: _standard_library, "pydoc": _manual}.get(
            source, lambda: generated(source)
        )()
    else:
        table = load_table(source, split)
        if Path(source).suffix in (".txt", ".md"):
            documents = _blocks("\n".join(table["text"]), Path(source).name)
        else:
            documents = _rows(table, column, source)
    if not documents:
        raise UserError(
            f"The corpus source {source!r} holds no text: every document in it is empty. Choose"
            " another source, or the column that holds the text."
        )
    return datasets.Dataset.from_dict(
        {"name": [name for name, _ in documents], "text": [text for _, text in documents]}
    )


def load_rows(source: str, split: str, first: int | None = None) -> datasets.Dataset | list[dict]:
    """The rows of a source, each a dictionary; with `first` only so many from its beginning,
    without reading all of it.

    Without `first` they stay on disk: a set may have millions of rows, of which few are looked at.
    """
    table = load_table(source, split, streaming=first is not None)
    return table if first is None else list(table.take(first))


def load_table(
    source: str, split: str = "train", streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """The rows of a file (local, or of a hub repository as `hf://datasets/...`) or of a Hugging
    Face dataset, with whatever columns they have.

    Raises:
        UserError: the file does not exist or cannot be read, or no dataset of that name can be
            loaded.
    """
    path = Path(source).expanduser()
    suffix, url = path.suffix, source.startswith("hf://")
    if suffix in FILE_FORMATS:
        if not url:
            _check_file(path, source)
        file = source if url else glob.escape(str(path))  # a name with brackets or stars is a name
        builder, arguments = FILE_FORMATS[suffix], {"data_files": file, "split": "train"}
    elif path.exists():
        raise UserError(
            f"Cannot tell the format of {source!r}: its name should end with one of"
            f" {', '.join(FILE_FORMATS)}."
        )
    else:
        builder, _, configuration = source.partition(":")
        if not is_hub_name(builder):
            raise UserError(
                f"{source!r}: there is no such file or folder, and it is no name of a hub dataset"
                " (NAME or ORG/NAME)."
            )
        arguments = {"name": configuration or None, "split": split}
    try:
        return datasets.load_dataset(builder, streaming=streaming, **arguments)
    except (
        Exception
    ) as error:  # the builders raise many unrelated types, each for a source the user can change
        if memory_is_short(error):
            raise unreadable(source, error, "") from error
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        if "data_files" in arguments:
            said = next((text for text in map(str, causes) if " in row " in text), str(causes[-1]))
            said = (_fault(path) if builder == "json" and not url else None) or said
            raise UserError(
                f"{source!r} cannot be read as {builder}: {said}. Mend the file, or give another."
            ) from error
        raise UserError(
            f"Cannot load {source!r} (split {split!r}): {error}. Give the path of a file that ends"
            f" with one of {', '.join(FILE_FORMATS)}, or the name of a Hugging Face dataset that"
            " this machine can reach."
        ) from error


def _check_file(path: Path, source: str) -> None:
    """Raise UserError for a file that is not there, empty, not UTF-8, or JSON nested too deeply for
    its readers.
    """
    if not path.is_file():
        raise UserError(
            f"There is no file {source!r}. Correct the path (relative paths start at the working"
            " folder)."
        )
    if path.stat().st_size == 0:
        raise UserError(f"The file {source!r} is empty. Choose a file that holds text.")
    if path.suffix == ".parquet":
        return
    with path.open("rb") as file:
        for number, line in enumerate([file.read()] if path.suffix == ".json" else file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                utf16 = (
                    " (it is UTF-16: save it as UTF-8)"
                    if line[:2] in (b"\xff\xfe", b"\xfe\xff")
                    else ""
                )
                before = line[: error.start].split(b"\n")  # of .json, which is read at once
                where = f"line {number + len(before) - 1}, byte {len(before[-1]) + 1}"
                raise UserError(
                    f"{source!r}, {where}: it is not UTF-8{utf16}. Mend the file, or give another."
                ) from error
            if (
                "json" in path.suffix
                and line.count(b"[") + line.count(b"{") > DEEPEST
                and _depth(line) > DEEPEST
            ):
                where = f", line {number}," if path.suffix == ".jsonl" else ""
                raise UserError(
                    f"{source!r}{where} is nested more than {DEEPEST} levels deep. Mend the file,"
                    " or give another."
                )


def _depth(data: bytes) -> int:
    """How deeply JSON is nested. Brackets in its strings do not count."""
    bare = np.frombuffer(re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data), np.uint8)
    steps = np.isin(bare, list(b"[{")).astype(np.int32) - np.isin(bare, list(b"]}"))
    return int(steps.cumsum().max(initial=0))


def _fault(path: Path) -> str | None:
    """Where a file of JSON is broken first, and how; None if nothing is found."""
    with path.open("rb") as file:
        for number, line in enumerate([file.read()] if path.suffix == ".json" else file, 1):
            try:
                row = json.loads(line.strip() or b"{}")
            except ValueError as error:
                at = getattr(error, "lineno", 1) + number - 1, getattr(error, "colno", 1)
                return (
                    f"line {at[0]}, column {at[1]}: it is no JSON ({getattr(error, 'msg', error)})"
                )
            if path.suffix == ".jsonl" and not isinstance(row, dict):
                return (
                    f'line {number}: it is a {type(row).__name__} and no object such as {{"text":'
                    " ...}"
                )
    return None


def require_column(table: datasets.Dataset, column: str, source: str) -> None:
    """Raises a UserError that lists the columns of `table` when `column` is not one of them."""
    if column not in table.column_names:
        raise UserError(
            f"{source!r} has no column {column!r}; its columns are {', '.join(table.column_names)}."
            " Set data.column to the one that holds the text."
        )


def split_documents(
    documents: datasets.Dataset, held_out: float, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Splits by document into (training, held out): about `held_out` (a fraction in (0, 1)) of the
    names are held out.

    A document's side depends on its name and `seed` alone, so it stays where it is when the corpus
    grows.

    Raises:
        UserError: one of the two sides is empty.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    for index, name in enumerate(documents["name"]):
        sides[by_hash(f"{seed}/{name}") < held_out].append(index)
    training, validation = sides
    if not training or not validation:
        raise UserError(
            f"Holding out {held_out} of {len(documents)} documents leaves {len(training)} to train"
            f" on and {len(validation)} held out; both need at least one. Change data.held_out or"
            " use a larger corpus."
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
    """One document per row; its name is the row's own `name` if there is one, else a hash of its
    text.
    """
    require_column(table, column, source)
    values = list(table[column])
    if (
        at := next((i for i, value in enumerate(values) if isinstance(value, (dict, list))), None)
    ) is not None:
        raise UserError(
            f"{source!r}: row {at + 1} has a {type(values[at]).__name__} in the column {column!r}"
            " and no text."
        )
    texts = ["" if text is None else str(text) for text in values]
    if "name" in table.column_names:
        names = [str(name) for name in table["name"]]
    else:
        names = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    return [(name, text) for name, text in zip(names, texts, strict=True) if text.strip()]


def _blocks(text: str, name: str) -> list[tuple[str, str]]:
    """Cuts a plain text between paragraphs into documents of at most about LONGEST_DOCUMENT
    characters; a longer one without blank lines between its lines, or without lines between words.
    """
    ends = ("\n[ \t]*\n", "\n\n"), ("\n", "\n"), (" ", " ")
    fitting = (
        (end, joint)
        for end, joint in ends
        if len(text) <= LONGEST_DOCUMENT or re.search(rf"\S[ \t]*{end}\s*\S", text)
    )
    end, joint = next(fitting, ends[-1])
    parts = [part for part in re.split(end, text) if part.strip()]
    blocks: list[str] = []
    size = LONGEST_DOCUMENT
    for part in parts:
        if size + len(part) > LONGEST_DOCUMENT:
            blocks.append(part)
            size = len(part)
        else:
            blocks[-1] += joint + part
            size += len(part)
    return [(f"{name}#{index}", block) for index, block in enumerate(blocks)]
