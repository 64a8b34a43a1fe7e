"""Python sources of the installed packages as training text: frozen by name, version and checksum.

The list `sources.tsv.gz` names every file that is trained on or held out. Which side a document is
on follows from the checksum of its content alone, so no run, seed or version of a package ever
tests on what it learned. Near-duplicates and generated files were left out when the list was made,
by `benchmarks/freeze_sources.py` of commit 02cf3498.
"""

import ast
import gzip
import hashlib
import importlib.metadata
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nde_talf.data.text.corpus import _blocks, by_hash
from nde_talf.data.text.generated import GENERATED
from nde_talf.decoding.common.errors import UserError

FROZEN = Path(__file__).with_name("sources.tsv.gz")
"""The frozen list."""
PYTHON = "python"
"""The name of the standard library among the packages."""
TOPICS = "pydoc_data/topics.py"
"""The manual that `help()` shows."""
CODE, MANUAL, ARITHMETIC, TABLES = DOMAINS = ("code", "manual", "arithmetic", "tables")
DIGITS = 12
"""Hexadecimal digits of a SHA-256 that the list keeps."""
HELD_OUT = 0.015
"""Fraction of the documents that nothing learns from."""
MANUAL_FILES = 0.8
"""Fraction of the sources whose longer docstrings are also read as a manual."""
SHORTEST_DOCSTRING = 500
"""Characters of a docstring that is long enough for a manual."""
MADE = 4000
"""Documents of worked arithmetic, and as many of tables."""
LICENCE = re.compile(r"copyright|licen[sc]e|all rights reserved|SPDX", re.IGNORECASE)


@dataclass(frozen=True)
class Document:
    """A text with the domain it is reported under.

    Attributes:
        held_out: whether prompts and held-out figures come from it; nothing is trained on it.
    """

    name: str
    domain: str
    text: str
    held_out: bool


@dataclass(frozen=True)
class Package:
    """A package as the list has it: path of a file -> the first digits of its SHA-256."""

    name: str
    version: str
    licence: str
    files: dict[str, str]

    def root(self) -> Path | None:
        """Return the folder of its files here; None if it is missing or has another version."""
        if self.name == PYTHON:
            here = platform.python_version() == self.version
            return Path(sysconfig.get_paths()["stdlib"]) if here else None
        for found in importlib.metadata.distributions(name=self.name):
            same = public(found.version) == self.version
            return Path(str(found.locate_file(""))) if same else None
        return None


def public(version: str) -> str:
    """Drop the part of a version that names a build, such as +cpu."""
    return version.partition("+")[0]


def read_frozen() -> list[Package]:
    """Read the packages of the frozen list."""
    packages: list[Package] = []
    for line in gzip.decompress(FROZEN.read_bytes()).decode().splitlines():
        if line.startswith("#"):
            name, version, licence = line[1:].split("\t")
            packages.append(Package(name, version, licence, {}))
        else:
            name, digest = line.split("\t")
            packages[-1].files[name] = digest
    return packages


def documents(packages: list[Package], partial: bool = False) -> Iterator[Document]:
    """Yield every document of the packages, then the built-in arithmetic and tables.

    Args:
        packages: the frozen list.
        partial: leave out what is missing or different here, in place of an error.

    Raises:
        UserError: a package is missing, has another version, or has files of other content.
    """
    faults = []
    for package in packages:
        root, other = package.root(), 0
        if root is None:
            faults.append(f"{package.name}=={package.version} is not installed")
            continue
        for name, digest in package.files.items():
            data = (root / name).read_bytes() if (root / name).is_file() else b""
            if short_digest(data) != digest:
                other += 1
                continue
            yield from of_file(f"{package.name}/{name}", data.decode(), digest)
        if other:
            faults.append(
                f"{package.name}: {other} of {len(package.files)} files are missing or different"
            )
    if faults and not partial:
        raise UserError(
            f"The frozen list of sources does not fit this environment: {'; '.join(faults)}."
            " Install these versions (pip install -c constraints.txt), or train on the rest with"
            " partial=true."
        )
    for domain, make in GENERATED.items():
        for name in (f"{domain}-{number}" for number in range(MADE)):
            yield _by_content(name, domain, make(name))


def of_file(name: str, text: str, digest: str) -> Iterator[Document]:
    """Yield the documents of one source: its code, and perhaps its docstrings as a manual."""
    if name.endswith(TOPICS):
        assigned = next(each for each in ast.parse(text).body if isinstance(each, ast.Assign))
        for topic, page in sorted(ast.literal_eval(assigned.value).items()):
            for block_name, block in _blocks(page, topic):
                yield _by_content(block_name, MANUAL, block)
        return
    held_out = is_held_out(digest)
    yield Document(name, CODE, without_licence(text), held_out)
    if by_hash(f"manual/{digest}") < MANUAL_FILES and (manual := docstrings(text)):
        yield Document(name.removesuffix(".py"), MANUAL, manual, held_out)


def _by_content(name: str, domain: str, text: str) -> Document:
    return Document(name, domain, text, is_held_out(short_digest(text.encode())))


def short_digest(data: bytes) -> str:
    """Return the first digits of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def is_held_out(digest: str) -> bool:
    """Decide by a content's digest alone whether it is held out."""
    return int(digest, 16) < HELD_OUT * 16**DIGITS


def without_licence(text: str) -> str:
    r"""Drop leading comments, and a leading docstring, that speak of a licence or copyright.

    >>> without_licence("# Copyright 2026 X\n# MIT licence\n\nimport os\n")
    'import os\n'
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    kept = text
    header = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)+", kept)
    if header:
        blocks = re.split(r"\n[ \t]*\n", header.group())
        kept = "\n\n".join(b for b in blocks if not LICENCE.search(b)).strip("\n")
        kept = re.sub(
            r"\A(#!|#.*coding[:=]|# *(fmt|mypy|flake8|ruff|pylint|type):)[^\n]*\n?", "", kept
        )
        kept = (kept + "\n" if kept.strip() else "") + text[header.end() :]
    docstring = re.match(r'\s*r?("""|\'\'\')(.*?)\1[ \t]*\n', kept, re.DOTALL)
    if docstring and re.search(
        r"licensed under|all rights reserved|permission is hereby",
        docstring.group(2),
        re.IGNORECASE,
    ):
        kept = kept[docstring.end() :]
    return kept.lstrip("\n")


def docstrings(source: str) -> str:
    """Lay a source's longer docstrings out as a manual: each under its name, indented."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST_DOCSTRING and not LICENCE.search(text):
                arguments = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
                parts.append(f"{node.name}{arguments}\n\n{text}\n")
    return "\n".join(parts)
