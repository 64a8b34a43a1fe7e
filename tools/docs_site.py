"""MkDocs hooks: what the site holds besides `docs/`.

- Files of the repository that pages link to (`EXTRA`): README.md, results of benchmarks and others.
  In the repository a page links to them as `../benchmarks/results/heads.md`; links are rewritten to
  where the file lies on the site.
- API pages of every public name of `nde_talf` and of the modules in `MODULES`. mkdocstrings reads
  the docstrings from the source, so that a site can be built without torch.
"""

import posixpath
import re
from itertools import chain
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PUBLIC = ROOT / "nde_talf/__init__.pyi"
"""Lists the public names and where each is defined: `from nde_talf.decoding.tree import DraftTree
as DraftTree`.
"""
RESULTS = ("benchmarks/results/*.md", "benchmarks/results/*.png")
EXTRA = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "checkpoints/README.md", *RESULTS)
# MkDocs takes a README.md for a folder's index.
RENAMED = {"README.md": "overview.md", "checkpoints/README.md": "runs.md"}
MODULES = {
    "testing": ("Proving rules: nde_talf.decoding.testing", "nde_talf.decoding.testing"),
    "verification": ("Verification: nde_talf.decoding.rules", "nde_talf.decoding.rules"),
}
PACKAGES = {"decoding": "Decoding", "draft_training": "Draft heads", "selector": "Selector"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the extra files and the API pages."""
    for path in sorted(chain.from_iterable(ROOT.glob(pattern) for pattern in EXTRA)):
        files.append(
            File.generated(
                config, site_uri(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)
            )
        )
    for uri, text in api_pages().items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository.

    A link to a file that is not on the site becomes its text.
    """
    uri = page.file.src_uri
    folder = posixpath.dirname(repository_path(uri))
    if uri == "reference/index.md":
        titles = PACKAGES | {name: title for name, (title, _) in MODULES.items()}
        return "\n".join(
            [markdown, "", *(f"- [{title}]({name}.md)" for name, title in titles.items())]
        )

    def rewritten(link: re.Match) -> str:
        mark, text, target, anchor = link.groups()
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        inside = site_uri(path)
        if (
            files.get_file_from_path(inside) is None
            and (ROOT / path).exists()
            and not path.startswith("docs/")
        ):
            return text
        return f"{mark}[{text}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor or ''})"

    return LINK.sub(rewritten, markdown)


def site_uri(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return RENAMED.get(path, path.removeprefix("docs/"))


def repository_path(uri: str) -> str:
    """The inverse of `site_uri`; API pages lie in docs/reference."""
    back = {new: old for old, new in RENAMED.items()}
    is_extra = (
        any(Path(uri).match(pattern) for pattern in EXTRA) and not (ROOT / "docs" / uri).exists()
    )
    return back.get(uri) or (uri if is_extra else f"docs/{uri}")


def api_pages() -> dict[str, str]:
    """Markdown of the API pages by address: a page a package of the public names, and one for each
    of `MODULES`.
    """
    pages = {}
    own = [module for _, module in MODULES.values()]
    homes = {
        name: home
        for home, name in re.findall(
            r"^from (\S+) import (\w+)", PUBLIC.read_text(encoding="utf-8"), re.M
        )
    }
    for package, title in PACKAGES.items():
        names = sorted(
            name
            for name, home in homes.items()
            if home.startswith(f"{package}.") and home not in own
        )
        intro = (
            f"Public names of `{package}`. Import them from `nde_talf`: `from nde_talf import"
            f" {names[0]}`."
        )
        pages[package] = "\n\n".join(
            [f"# {title}", intro, *(f"::: {homes[name]}.{name}" for name in names)]
        )
    for name, (title, module) in MODULES.items():
        pages[name] = f"# {title}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
    return {f"reference/{name}.md": text for name, text in pages.items()}
