"""What the tests promise about themselves and about the packages that are shipped."""

import ast
import tomllib

import pytest

from tests import ROOT

MODULES = sorted((ROOT / "tests").rglob("test_*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def imported(source: str) -> set[str]:
    """Last part of every module and name that `source` imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name.rpartition(".")[2] for alias in node.names}
    return names


@pytest.mark.parametrize(
    "module", MODULES, ids=lambda module: str(module.relative_to(ROOT / "tests"))
)
def test_a_module_of_tests_imports_no_other(module):
    others = {other.stem for other in MODULES} | {"conftest"}
    assert not imported(module.read_text()) & others, (
        "move what is shared to a helper module beside the tests"
    )


def test_shipped_packages_are_marked_as_typed():
    shipped = {
        pattern.rstrip("*")
        for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    data = PYPROJECT["tool"]["setuptools"]["package-data"]
    for package in shipped - {"configs"}:
        assert (ROOT / package / "py.typed").is_file() and "py.typed" in data[package], package
