"""The rooms of the library: what may import what, no circle among modules, a short loop.

`python -m tests.test_rooms` prints the modules that the decode loop reaches, with their sizes.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nde_talf.pipelines.commands.work import WORK
from tests import ROOMS, ROOT

MAY_IMPORT = {
    "decoding": (),
    "data": ("decoding",),
    "selector": ("decoding", "data"),
    "draft_training": ("decoding", "data"),
    "evaluation": ("decoding", "data", "selector", "draft_training"),
    "pipelines": ("decoding", "data", "selector", "draft_training", "evaluation"),
    "nde_talf": ("decoding", "data", "selector", "draft_training", "evaluation", "pipelines"),
}
"""pipelines -> evaluation -> {selector, draft_training} -> data -> decoding."""

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def name(path: Path) -> str:
    """The name that `path` is imported by: nde_talf.decoding.loop, nde_talf.cli."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "nde_talf" else ("nde_talf", *parts)).removesuffix(
        ".__init__"
    )


def room_of(module: str) -> str:
    """The room that a module stands in; nde_talf for the API itself."""
    second = module.split(".")[1:2]
    return second[0] if second and second[0] in ROOMS else "nde_talf"


FILES = {
    name(path): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if not path.parent.is_symlink()
}


def imported(node: ast.AST) -> Iterator[str]:
    """Modules of the project that an import statement names."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in FILES else node.module for name in inner]
    yield from (name for name in names if name.split(".")[0] == "nde_talf")


@cache
def tree(module: str) -> ast.Module:
    """The statements of a module."""
    return ast.parse(FILES[module].read_text())


@cache
def imports(module: str) -> set[str]:
    """Everything of the project that a module imports: in functions and for type checkers too."""
    return {name for node in ast.walk(tree(module)) for name in imported(node)} - {module}


def reached(module: str, seen: set[str]) -> set[str]:
    """Add to `seen` the modules that `module` imports, and that these import."""
    for name in imports(module) & FILES.keys():
        if name not in seen:
            seen.add(name)
            reached(name, seen)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room):
    for module in FILES:
        if room_of(module) == room:
            others = {room_of(name) for name in imports(module)} - {room}
            assert others <= set(MAY_IMPORT[room]), (
                f"{module} imports {others - set(MAY_IMPORT[room])}"
            )


def test_the_library_imports_nothing_outside_its_wheel():
    outside = re.compile(r"^\s*(?:from|import) (?:benchmarks|recipes|tests)\b", re.M)
    assert not [module for module, path in FILES.items() if outside.search(path.read_text())]


def test_decoding_common_imports_nothing_else_of_the_project():
    common = [module for module in FILES if module.startswith("nde_talf.decoding.common")]
    assert len(common) > 3
    for module in common:
        foreign = {
            name for name in imports(module) if not name.startswith("nde_talf.decoding.common")
        }
        assert not foreign, f"{module} imports {foreign}"


@pytest.mark.slow
def test_no_module_imports_itself_through_others():
    assert not [module for module in FILES if module in reached(module, set())]


BY_NAME = {
    "nde_talf": "the public names",
    "nde_talf.cli": "the table of commands",
    "nde_talf.decoding.registry": "the registries",
    "nde_talf.pipelines.commands.work": "the work of the commands",
}
"""Modules that may import others by name, and which ones."""


@pytest.mark.slow
def test_own_modules_are_imported_at_the_top_alone():
    inside = [
        f"{module}: {', '.join(found)}"
        for module in FILES
        for node in tree(module).body
        if not isinstance(node, (ast.Import, ast.ImportFrom))
        if (found := [name for inner in ast.walk(node) for name in imported(inner)])
    ]
    assert not inside


def test_only_listed_modules_import_by_name():
    by_name = re.compile(r"\bimport_module\(|\b__import__\(|\bimportlib\.import_module\b")
    found = {module for module, path in FILES.items() if by_name.search(path.read_text())}
    assert found == BY_NAME.keys()


@pytest.mark.parametrize("work", WORK)
def test_every_work_of_a_command_is_a_module(work):
    assert f"nde_talf.pipelines.{WORK[work]}" in FILES


def tokens(file: Path) -> int:
    """Count the tokens of a file but for comments, layout and strings that stand alone."""
    count, alone = 0, True
    with file.open("rb") as opened:
        for token in tokenize.tokenize(opened.readline):
            count += token.type not in LAYOUT and not (alone and token.type == tokenize.STRING)
            alone = token.type in LAYOUT
    return count


def modules_of_the_loop() -> dict[str, int]:
    """The modules that the decode loop reaches, with their tokens; empty packages are no reading."""
    loop = "nde_talf.decoding.loop"
    sizes = {name: tokens(FILES[name]) for name in {loop} | reached(loop, set())}
    return {name: size for name, size in sizes.items() if size}


@pytest.mark.slow
def test_the_loop_is_read_in_an_afternoon():
    sizes = modules_of_the_loop()
    assert len(sizes) <= 30 and sum(sizes.values()) <= 25_000


HABITS = {
    "that of": r"\b(?:that|those) of\b",
    "a module that knows, a class that is told": r"\b[Kk]nows\b|\b(?:is|are|was|were) told\b",
    "goes on, lies, stands, is said": r"\b(?:go(?:es|ing)?|went) on\b|\blies?\b"
    r"|\bstands?\b(?! (?:in )?for)|\b(?:is|are) said\b",
    "a for per": r"\b(?:bytes|nodes|passes|rows|tokens) an? (?:level|row|step|text|token)\b(?! of)",
    "a clause as a noun": r"\A(?:What|Where|How|Whether)\b",
}
"""Habits of docstrings and comments that a pattern finds; CONTRIBUTING.md asks for plain English."""


def prose(module: str) -> Iterator[str]:
    """The docstrings and comments of a module, each on one line."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield " ".join(str(node.value.value).split())
    with FILES[module].open("rb") as opened:
        for token in tokenize.tokenize(opened.readline):
            if token.type == tokenize.COMMENT:
                yield token.string


@pytest.mark.parametrize("habit", HABITS)
def test_docstrings_and_comments_are_plain(habit):
    pattern = re.compile(HABITS[habit])
    found = [
        f"{module}: ...{text[max(0, match.start() - 40) : match.end() + 40]}..."
        for module in FILES
        for text in prose(module)
        if (match := pattern.search(text))
    ]
    assert not found


if __name__ == "__main__":
    for name, size in sorted(modules_of_the_loop().items(), key=lambda item: -item[1]):
        print(f"{size:7,} {name}")
