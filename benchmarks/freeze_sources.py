"""Make the frozen list of sources.

`python -m benchmarks.freeze_sources recipes/small/sources.tsv.gz`. It is made once, before the
first step of a training, and committed; made again, it has the same packages. Generated files,
vendored copies and near-duplicates, on either side of the split and across it, are left out.
"""

import gzip
import importlib.metadata
import platform
import re
import sys
import sysconfig
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nde_talf.data.text.corpus import SKIPPED_FOLDERS, by_hash
from recipes.small.sources import (
    PYTHON,
    TOPICS,
    Package,
    is_held_out,
    public,
    read_frozen,
    short_digest,
    without_licence,
)

SKIPPED = SKIPPED_FOLDERS - {"test", "tests", "site-packages", "dist-packages"} | {
    "_vendor",
    "vendor",
    "vendored",
    "_vendored",
    "extern",
    "externals",
    "third_party",
    "_distutils",
    "unidata",
    "turtledemo",
    "unicode",
    "styles",
    "_pyrepl",
}
"""Folders of copies, generated tables and data."""
VERSIONS = {
    "version.py",
    "_version.py",
    "__config__.py",
    "_sysconfigdata__linux_x86_64-linux-gnu.py",
}
"""Files that differ between builds of one version."""
GENERATED = re.compile(
    r"@generated|auto-?generated|automatically generated|generated (by|from|automatically)"
    r"|do not (edit|modify)|machine generated",
    re.IGNORECASE,
)
TESTS = 0.2
"""Fraction of the tests that is taken: they are long and repeat themselves."""
SIZES = 300, 300_000
"""Bytes of the smallest and largest file."""
MOST_DIGITS, LONGEST_LINE = 0.15, 120
"""Largest fraction of digits, and largest mean length of a line."""
NEAR, NEAR_ACROSS = 0.5, 0.2
"""Fraction of a file's shingles that may occur in another of its side, and, for a held-out one, in
the other side.
"""


def freeze(path: Path) -> None:
    """Write the list of the sources that this environment has, and print what it holds.

    The packages and their licences are those of the list that there is.
    """
    found = [(package, *listed(package.name)) for package in read_frozen()]
    sources = {
        package.name: [source for each in sorted(names) if (source := readable(root / each, each))]
        for package, root, _, names in found
    }
    kept = {*map(id, distinct([source for each in sources.values() for source in each]))}
    packages = []
    for old, root, version, _ in found:
        chosen = [source for source in sources[old.name] if id(source) in kept]
        listing = {source.path: source.digest for source in chosen}
        if old.name == PYTHON:
            listing[TOPICS] = short_digest((root / TOPICS).read_bytes())
        packages.append(Package(old.name, version, old.licence, listing))
        size = sum(len(source.text) for source in chosen)
        print(f"{old.name}=={version}: {len(chosen)} files, {size / 1e6:.2f} MB")
    write_frozen(path, [package for package in packages if package.files])


def write_frozen(path: Path, packages: list[Package]) -> None:
    """Write the list that `read_frozen` reads, the same bytes for the same packages."""
    lines = []
    for package in packages:
        lines.append(f"#{package.name}\t{package.version}\t{package.licence}")
        lines += [f"{name}\t{digest}" for name, digest in sorted(package.files.items())]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0))


@dataclass(frozen=True)
class Source:
    """A file that may be taken: its path, the digest of its bytes, its text without licence."""

    path: str
    digest: str
    text: str


def listed(name: str) -> tuple[Path, str, list[str]]:
    """Return a package's root, version and the paths of its Python files."""
    if name == PYTHON:
        root, version = Path(sysconfig.get_path("stdlib")), platform.python_version()
        inside = (path.relative_to(root) for path in root.rglob("*.py"))
        paths = [path for path in inside if path.parts[0] not in ("site-packages", "test")]
    else:
        found = importlib.metadata.distribution(name)
        root, version = Path(str(found.locate_file(""))), public(found.version)
        paths = [Path(file) for file in found.files or () if file.suffix == ".py"]
    return root, version, [path.as_posix() for path in paths]


def readable(path: Path, name: str) -> Source | None:
    """Return a file without its licence, or None.

    None where it is generated, a table, a copy, or not to be taken.
    """
    parts = Path(name).parts
    if ".." in parts or SKIPPED.intersection(parts[:-1]) or parts[-1] in VERSIONS:
        return None
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    digest = short_digest(data)
    if not SIZES[0] <= len(data) <= SIZES[1] or GENERATED.search(text[:3000]):
        return None
    is_test = {"tests", "test", "testing", "_testing"} & {*parts} or parts[-1].startswith("test_")
    if is_test and by_hash(f"test/{digest}") >= TESTS:
        return None
    lines = text.count("\n") + 1
    if (
        sum(map(text.count, "0123456789")) > MOST_DIGITS * len(text)
        or len(text) > LONGEST_LINE * lines
    ):
        return None
    cleaned = without_licence(text)
    return Source(name, digest, cleaned) if len(cleaned) >= SIZES[0] else None


def distinct(sources: list[Source]) -> list[Source]:
    """Return the sources that are near-duplicates of none before them.

    Shingles are three lines on end, without indentation. Of files that resemble each other the
    first stays; between the two sides the one to train on stays, so that nothing held out resembles
    it.
    """
    sides: dict[bool, set[int]] = {False: set(), True: set()}
    kept: list[Source] = []
    counts: Counter[str] = Counter()
    for source in sorted(sources, key=lambda source: is_held_out(source.digest)):
        held_out, own = is_held_out(source.digest), shingles(source.text)
        near = sum(shingle in sides[held_out] for shingle in own) > NEAR * len(own)
        common = sum(shingle in sides[False] for shingle in own)
        across = held_out and common > NEAR_ACROSS * len(own)
        side = "held out" if held_out else "training"
        counts[f"{side}: {'near' if near else 'across' if across else 'kept'}"] += 1
        if not near and not across:
            kept.append(source)
            sides[held_out].update(own)
    print(dict(counts))
    return kept


def shingles(text: str) -> list[int]:
    r"""Return a hash of each three lines on end.

    >>> len(shingles("a = 1\n  b = 2\nc = 3\n\nd = 4\n")), len(shingles("a = 1"))
    (2, 1)
    """
    lines = [zlib.crc32(line.strip().encode()) for line in text.splitlines() if line.strip()]
    hashes = np.array([0] * max(0, 3 - len(lines)) + lines, np.uint64)
    mixed = (
        hashes[:-2] * np.uint64(0x9E3779B97F4A7C15)
        + hashes[1:-1] * np.uint64(0xC2B2AE3D27D4EB4F)
        + hashes[2:]
    )
    return mixed.tolist()


if __name__ == "__main__":
    freeze(Path(sys.argv[1]))
