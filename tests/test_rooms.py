"""The rooms of the library: what may import what, no circle among modules, and no file that is too long."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("decoding", "data", "selector", "draft_training", "evaluation", "pipelines", "nde_talf")
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
LONGEST = 300
"""Code lines of a file: no blank lines, comments or docstrings."""

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}


def imported(node: ast.AST) -> Iterator[str]:
    """Modules of the project that an import statement names."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in FILES else node.module for name in inner]
    yield from (name for name in names if name.split(".")[0] in ROOMS)


def imports(module: str) -> set[str]:
    """Everything of the project that a module imports, wherever in it."""
    return {name for node in ast.walk(ast.parse(FILES[module].read_text())) for name in imported(node)}


def imports_at_once(module: str) -> set[str]:
    """What a module imports while it is imported itself: not in functions, and not for type checkers alone."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        found.update(imported(node))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(FILES[module].read_text()))
    return found - {module}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room):
    for module in FILES:
        if module.split(".")[0] == room:
            others = {name.split(".")[0] for name in imports(module)} - {room}
            assert others <= set(MAY_IMPORT[room]), f"{module} imports {others - set(MAY_IMPORT[room])}"


def test_decoding_common_imports_nothing_else_of_the_project():
    own = [module for module in FILES if module.startswith("decoding.common")]
    assert len(own) > 3
    for module in own:
        foreign = {name for name in imports(module) if not name.startswith("decoding.common")}
        assert not foreign, f"{module} imports {foreign}"


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


def test_a_circle_would_be_found(monkeypatch, tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.py").write_text(f"from decoding.{other} import x\n")
        monkeypatch.setitem(FILES, f"decoding.{name}", tmp_path / f"{name}.py")
    with pytest.raises(AssertionError, match=r"decoding\.a -> decoding\.b -> decoding\.a"):
        test_no_module_imports_itself_through_others()


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    source = path.read_text()
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in layout)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - texts)


def test_no_file_is_longer_than_three_hundred_code_lines():
    long = {module: lines for module, path in FILES.items() if (lines := code_lines(path)) > LONGEST}
    assert not long
