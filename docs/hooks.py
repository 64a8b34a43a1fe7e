"""Hooks of `make docs`: pages of the site that are not written by hand in docs/.

`reference/keys.md` comes from the settings' dataclasses. Files outside docs/ that pages link to are
put under `repository/`, with the links rewritten, so that mkdocs refuses a link that leads nowhere.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from nde_talf.decoding.common.json_validation import adapter
from nde_talf.decoding.common.settings import NAME
from nde_talf.draft_training.export.head_format import Note
from nde_talf.draft_training.export.vectors import HeadVectors
from nde_talf.pipelines.commands.check import CheckConfig
from nde_talf.pipelines.commands.export import ExportConfig
from nde_talf.pipelines.commands.generate import GenerateConfig
from nde_talf.pipelines.commands.recommend import RecommendConfig
from nde_talf.pipelines.config.schema import Config
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.schema import SelectorSchema

ROOT = Path(__file__).resolve().parents[1]
KEYS, OUTSIDE, INDEX = "reference/keys.md", "repository/", "README.md"
LINK = re.compile(r"(\]\()([^)#\s]+)")
COMMANDS = {
    "nde run": Config,
    "nde generate": GenerateConfig,
    "nde check": CheckConfig,
    "nde recommend": RecommendConfig,
    "nde export": ExportConfig,
}
SCHEMAS = {
    "selector-config": SelectorSchema,
    "table": LatencyTable,
    "head-note": Note,
    "head-vectors": HeadVectors,
}
"""What exports hold as JSON: config.json of a selector, table.json, and a head's `draft_head` and
vectors.json. Their JSON schemas are `reference/NAME.schema.json`.
"""
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null"}
HEAD = """# Commands and keys

Every key that a command takes, as `key=value`, with its type and default. A preset (`model=small`
unless you name another) may set another value; `--cfg job` prints what a command line comes to.

| exit status | means |
|---|---|
| 0 | done |
| 1 | it failed: the message says why and what to do; or `nde check` found a difference |
| 2 | the command line cannot be read: an unknown command, key or preset, or a value not allowed |
| 130 | ended by Ctrl-C; the same command continues |
| 143 | ended by SIGTERM; the same command continues |
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of keys, and every file outside docs/ that a page links to."""
    files.append(File.generated(config, KEYS, content=keys_page()))
    for name, kind in SCHEMAS.items():
        schema = json.dumps(adapter(kind).json_schema(), indent=2)
        files.append(File.generated(config, f"reference/{name}.schema.json", content=schema))
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    todo, seen = list(pages.items()), set[str]()
    while todo:
        page, text = todo.pop()
        for target in {linked(link, page) for _, link in LINK.findall(text)} - seen - {None}:
            seen.add(target)
            if target.startswith("docs/"):
                continue
            path, place = ROOT / target, placed(target)
            text = listing(path) if path.is_dir() else ""
            how: dict[str, Any] = {"content": text} if text else {"abs_src_path": str(path)}
            how["inclusion"] = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place, **how))
            if place.endswith(".md"):
                page = f"{target}/{INDEX}" if path.is_dir() else target
                todo.append((page, text or path.read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between docs/ and the rest of the repository as they are on the site."""
    here = page.file.src_uri
    return rewritten(markdown, here)


def rewritten(markdown: str, here: str) -> str:
    """Return a page's text with its links as they are on the site, where it is at `here`."""
    page = here.removeprefix(OUTSIDE) if here.startswith(OUTSIDE) else f"docs/{here}"

    def replaced(match: re.Match[str]) -> str:
        target = linked(match[2], page)
        return match[0] if target is None else match[1] + relpath(placed(target), dirname(here))

    return LINK.sub(replaced, markdown)


def linked(link: str, page: str) -> str | None:
    """Return the file or folder in the repository that a page's link names, or None."""
    path = normpath(join(dirname(page), link))
    return path if "://" not in link and (ROOT / path).exists() else None


def placed(target: str) -> str:
    """Return where a file or folder of the repository is on the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return OUTSIDE + (f"{target}/{INDEX}" if (ROOT / target).is_dir() else target)


def listing(folder: Path) -> str:
    """Return a page of a folder: its README, or links to the pages in it."""
    if (folder / INDEX).exists():
        return (folder / INDEX).read_text("utf-8")
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*.md")))
    return "\n".join([f"# {folder.name}\n", *(f"- [{name}]({name})" for name in names)])


def keys_page() -> str:
    """Return the reference of all keys, a section a command and a table a group."""
    parts = [HEAD]
    for command, schema in COMMANDS.items():
        parts.append(f"\n## {command}\n\n{inspect.getdoc(schema)}\n")
        for group, rows in groups(schema):
            title = f"`{group}.*`" if group else "Keys without a group"
            parts.append(f"\n### {title}\n\n| key | type | default | |\n|---|---|---|---|\n")
            parts += [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join(parts)


def groups(schema: type, prefix: str = "") -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """List the groups of nested settings with a row for each key, outer groups first."""
    hints, told = get_type_hints(schema, include_extras=True), docstrings(schema)
    rows, within = [], []
    for each in fields(schema):
        hint, key = hints[each.name], prefix + each.name
        inner = [*settings_in(hint)]
        named = {dict: f".{NAME}", list: "[0]"}.get(get_origin(plain(hint)), "")
        within += [(kind, f"{key}{named}.") for kind in inner]
        if not inner or named:
            row = (f"`{key}`", type_name(hint), default(each), told.get(each.name, ""))
            rows.append(tuple(part.replace("|", "\\|") for part in row))
    if rows:
        yield prefix.rstrip("."), rows
    for kind, start in within:
        yield from groups(kind, start)


def docstrings(schema: type) -> dict[str, str]:
    """Return the first paragraph of each field's docstring, base classes' too."""
    told: dict[str, str] = {}
    for kind in reversed(schema.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                whole = inspect.cleandoc(ast.literal_eval(text.value))
                told[field.target.id] = " ".join(whole.split("\n\n")[0].split())
    return told


def plain(hint: Any) -> Any:
    """Return a type without what checks it."""
    return plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def settings_in(hint: Any) -> Iterator[type]:
    """List the settings classes in a type."""
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from settings_in(part)


def type_name(hint: Any) -> str:
    """Return a type in words."""
    hint = plain(hint)
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(type_name, parts))
    if kind is Literal:
        return ", ".join(map(str, parts))
    if kind is list:
        return f"list of {type_name(parts[0])}"
    if kind is dict:
        return f"{type_name(parts[1])} by name"
    return "group" if is_dataclass(hint) else WORDS.get(hint, "anything")


def default(field: Field[Any]) -> str:
    """Return a field's default as a command line gives it."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "none: give it"
    value = field.default_factory() if field.default is MISSING else field.default
    if isinstance(value, list):
        return f"`[{','.join(map(str, value))}]`"
    if value in ("", {}):
        return "empty"
    words = {None: "null", True: "true", False: "false"}
    return f"`{words[value] if value is None or isinstance(value, bool) else value}`"
