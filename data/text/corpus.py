"""Text to train on, as a dataset of named documents.

Text comes from Python's standard library, local files and Hugging Face datasets; several corpora
can be one. Documents are held out by name.
"""

import csv
import glob
import hashlib
import math
import os
import re
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets

from nde_talf.data.text.generated import documents as generated
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.rows import Rows, json_rows
from nde_talf.data.text.settings import (
    BUILT_IN,
    FILE_FORMATS,
    STANDARD_LIBRARY,
    Corpus,
    is_hub_name,
)
from nde_talf.decoding.common.checksums import file_digest, short_hash
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import content_digest, unreadable

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
"""Folders of the standard library that are left out: tests, installed packages, and generated
tables and manuals.
"""

LONGEST_DOCUMENT = 5_000
"""Characters of a plain-text document, at most; a longer file becomes several documents cut between
paragraphs.
"""
COLUMNS = {"name": datasets.Value("string"), "text": datasets.Value("large_string")}
"""Columns of documents; a plain string column ends at 2 GiB of text."""
SOURCES = (
    f"a folder, a file that ends with one of {', '.join(FILE_FORMATS)}, or the name of a Hugging"
    " Face dataset that this machine can reach (NAME or ORG/NAME)"
)
"""Sources of rows, for messages."""
HUB_FILES = "hf://"
"""Begins the name of a file on the hub."""


def load_documents(source: str, column: str = "text", split: str = "train") -> datasets.Dataset:
    """Load the documents of `source`, always in the same order: columns `name` and `text`.

    Args:
        source: one of `BUILT_IN`, such as `"stdlib"`, a path to a .txt, .md, .jsonl, .json or
            .parquet file, or the name of a Hugging Face dataset, with its configuration after a
            colon if it has several (`"openai/gsm8k:main"`).
        column: the column that holds the text. Plain-text files have one only, `text`.
        split: the split of a Hugging Face dataset.

    Raises:
        UserError: the file is missing, the column is not there, or nothing is left to read.
    """
    template = RowTemplate(f"{{{column}}}", source, "data.column")
    documents = _named_texts(source, template, split)
    if not documents:
        raise UserError(
            f"The corpus source {source!r} holds no text: every document in it is empty. Choose"
            " another source, or the column that holds the text."
        )
    names, texts = zip(*documents, strict=True)
    return datasets.Dataset.from_dict({"name": names, "text": texts}, datasets.Features(COLUMNS))


def load_mixture(mix: dict[str, Corpus]) -> datasets.Dataset:
    """Load several corpora as one: columns name, text, kind (the corpus) and for_draft.

    for_draft says that the draft learns from a document. It and the choice of documents depend on
    their names alone.

    Raises:
        UserError: a corpus cannot be read or does not fit its template.
    """
    rows = []
    for kind, corpus in mix.items():
        source, size = corpus.source or "", 0  # the checks before any work refuse ""
        template = RowTemplate(corpus.template, source, f"data.mix.{kind}.template")
        texts = _named_texts(source, template, corpus.split)
        for name, text in sorted(texts, key=lambda d: by_hash(f"take/{d[0]}")):
            if size >= (corpus.characters or math.inf):
                break
            size += len(text)
            for_draft = by_hash(f"draft/{name}") < corpus.draft_fraction
            rows.append({"name": name, "text": text, "kind": kind, "for_draft": for_draft})
    if not rows:
        raise UserError(f"data.mix: {', '.join(mix)} hold no text: every document is empty.")
    columns = COLUMNS | {"kind": datasets.Value("string"), "for_draft": datasets.Value("bool")}
    return datasets.Dataset.from_list(rows, datasets.Features(columns))


def _named_texts(source: str, template: RowTemplate, split: str) -> list[tuple[str, str]]:
    """Read (name, text) of a source's documents.

    A row is named by the column `name` if it tells rows apart, and else by a hash of its text.
    """
    if source in BUILT_IN:
        return _built_in(source)
    table = load_table(source, split)
    if source.endswith((".txt", ".md")):
        return _blocks("\n".join(row["text"] for row in table), Path(source).name)
    template.check(table.column_names)
    named = "name" in table.column_names
    named = named and len({str(row["name"]) for row in table}) == len(table)
    texts = ((row, template.render(row)) for row in table)
    return [
        (str(row["name"]) if named else short_hash(text), text)
        for row, text in texts
        if text.strip()
    ]


def load_table(source: str, split: str = "train", first: int | None = None) -> Rows:
    """Load the rows of a file or of a Hugging Face dataset, with whatever columns they have.

    Args:
        source: a local file, a file of a hub repository (`hf://datasets/...`), or a dataset's name.
        split: of a dataset.
        first: only so many rows from the beginning of what is on the hub.

    Raises:
        UserError: it does not exist or cannot be read.
    """
    try:
        return _load_table(source, split, first)
    except UserError:
        raise
    except ConnectionError as error:
        raise UserError(
            f"{source}: the hub cannot be reached, and the dataset is not in its cache. Check the"
            " connection, or give a file."
        ) from error
    except Exception as error:  # many unrelated types, of which the first cause says most
        cause: BaseException = error
        while deeper := cause.__cause__ or cause.__context__:
            cause = deeper
        raise unreadable(source, cause, f"give {SOURCES}") from error


def _load_table(source: str, split: str, first: int | None) -> Rows:
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return _load_folder(path)
    name, _, configuration = source.partition(":")
    arguments: dict[str, Any]
    if path.suffix in FILE_FORMATS:
        if not source.startswith(HUB_FILES):
            if not path.exists():
                raise UserError(f"{source}: there is no such file.")
            return _load_file(path)
        name, arguments = FILE_FORMATS[path.suffix], {"data_files": source, "split": "train"}
    elif is_hub_name(name) and not path.exists():
        arguments = {"name": configuration or None, "split": split}
    else:
        raise UserError(f"{source!r} is nothing that can be read. Give {SOURCES}.")
    if first is None:
        return _rows_of(datasets.load_dataset(name, **arguments))
    stream = datasets.load_dataset(name, streaming=True, **arguments)
    return Rows([*stream.take(first)])


def _rows_of(dataset: Any) -> Rows:
    return Rows(dataset, dataset.column_names)


def source_digest(source: str) -> str | None:
    """Return the digest of a file, or of a folder's files that are read; None for other sources."""
    path = Path(os.path.expanduser(source))
    if not source or source in BUILT_IN or not path.exists():
        return None
    if path.is_file():
        return file_digest(path)
    return content_digest(
        [(str(each.relative_to(path)), file_digest(each)) for each in _files(path)]
    )


def _files(folder: Path) -> list[Path]:
    """List the files of a folder that hold rows; where there are none, its texts."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in FILE_FORMATS]
    paths = [path for path in paths if path.is_file() and path.stem != "README"]
    return [path for path in paths if FILE_FORMATS[path.suffix] != "text"] or paths


def _load_folder(folder: Path) -> Rows:
    """Load the files of a folder as one table; a text file is one row."""
    rows: list[dict[str, Any]] = []
    for path in _files(folder):
        own = load_table(str(path))
        text = FILE_FORMATS[path.suffix] == "text"
        rows += [{"text": "\n".join(row["text"] for row in own)}] if text else own
    if not rows:
        raise UserError(f"{str(folder)!r}: it holds no file to read. Give {SOURCES}.")
    return Rows(rows)


def _load_file(path: Path) -> Rows:
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    builder = FILE_FORMATS[path.suffix]
    if builder == "json":
        return json_rows(path)
    how = _as_written(path) if builder == "csv" else {}
    file = glob.escape(str(path))  # a name with brackets or stars is a name
    return _rows_of(datasets.load_dataset(builder, data_files=file, split="train", **how))


def _as_written(path: Path) -> dict[str, Any]:
    """Return how a CSV file is read: all values as texts, divided by , ; or tab as line 1 is."""
    with path.open(encoding="utf-8-sig") as file:
        names = file.readline()
    mark = next((mark for mark in ",;\t" if mark in names), ",")
    (columns,) = csv.reader([names], delimiter=mark)
    features = datasets.Features({name: datasets.Value("large_string") for name in columns})
    return {"sep": mark, "features": features, "keep_default_na": False}


def split_documents(
    documents: datasets.Dataset, held_out: float, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split by document into training and held-out documents.

    About the fraction `held_out`, in (0, 1), of the names are held out. A document's side depends
    on its name and `seed` alone, so it stays where it is when the corpus grows.

    Raises:
        UserError: one of the two sides is empty.
    """
    aside = [by_hash(f"{seed}/{name}") < held_out for name in documents["name"]]
    training, validation = ([i for i, a in enumerate(aside) if a == side] for side in (False, True))
    if not training or not validation:
        raise UserError(
            f"Holding out {held_out} of {len(documents)} documents or dialogues, of which"
            f" {len(set(documents['name']))} differ, leaves {len(training)} to train on and"
            f" {len(validation)} held out; both need at least one. Change held_out or give more."
        )
    return documents.select(training), documents.select(validation)


def by_hash(key: str) -> float:
    """Map a key to a number in [0, 1), uniform over keys and the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64


def _built_in(source: str) -> list[tuple[str, str]]:
    """Read or make the documents of a built-in source."""
    if source == STANDARD_LIBRARY:
        return _standard_library()
    if source == "pydoc":
        from pydoc_data.topics import topics

        return [block for topic, text in sorted(topics.items()) for block in _blocks(text, topic)]
    return generated(source)


def _standard_library() -> list[tuple[str, str]]:
    """Read (path, source) of every readable module of the standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        with suppress(UnicodeDecodeError, OSError):
            if (text := path.read_text(encoding="utf-8")).strip():
                documents.append((relative.as_posix(), text))
    return documents


def _blocks(text: str, name: str) -> list[tuple[str, str]]:
    """Cut a plain text between paragraphs into documents of about LONGEST_DOCUMENT characters.

    A longer one without blank lines is cut between its lines, one without lines between words.
    """
    for end in ("\n[ \t]*\n", "\n", " "):
        if len(text) <= LONGEST_DOCUMENT or re.search(rf"\S[ \t]*{end}\s*\S", text):
            break
    joint = end.replace("[ \t]*", "")
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
