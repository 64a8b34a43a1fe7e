"""The rooms of the library: what may import what, and no circle among modules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def imports(module: str) -> set[str]:
    """Everything of the project that a module imports, wherever in it."""
    return {
        name for node in ast.walk(ast.parse(FILES[module].read_text())) for name in imported(node)
    }


def imports_at_once(module: str) -> set[str]:
    """What a module imports while it is imported itself: not in functions, and not for type
    checkers alone.
    """
    modules: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        modules.update(imported(node))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(FILES[module].read_text()))
    return modules - {module}


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
    graph = {module: imports_at_once(module) for module in FILES}
    done: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in sorted(graph.get(module, ())):
                follow(name, (*path, module))
            done.add(module)

    for module in graph:
        follow(module, ())
