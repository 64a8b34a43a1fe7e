"""Pages that `make docs` makes: the reference of keys, and the files that pages link to."""

import importlib.util
import json
from posixpath import dirname, join, normpath

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import get_files

from nde_talf.data.text.shipped import SHIPPED
from nde_talf.decoding.common.json_validation import adapter
from nde_talf.decoding.common.settings import keys
from tests import ROOT


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_of_every_command_is_in_the_reference(hooks):
    for command, part in zip(hooks.COMMANDS, hooks.keys_page().split("\n## ")[1:], strict=True):
        rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| `")]
        assert all(len(row) >= 4 and len(row[-1]) > 5 for row in rows)
        listed = {row[0].strip("| `") for row in rows}
        known = {*keys(hooks.COMMANDS[command])}
        groups = {key for key in known - listed if any(k.startswith(f"{key}.") for k in known)}
        assert listed == known - groups
    assert "| `draft.layer` | text | `family` | `family`: a decoder layer" in hooks.keys_page()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("table", "latency/table.json"),
        ("selector-config", "selector/export/traversal/config.json"),
        ("head-vectors", "draft/export/vectors.json"),
    ],
)
def test_schemas_describe_what_ships(hooks, name, file):
    schema = adapter(hooks.SCHEMAS[name]).json_schema()
    content = json.loads((SHIPPED / file).read_text())
    added = {"format", "sha256", "scalars", "trees"}
    assert {*schema["required"]} <= {*content} <= {*schema["properties"]} | added


def test_links_of_all_pages_stay_on_the_site(hooks):
    config = load_config(str(ROOT / "mkdocs.yml"), plugins=[])
    files = config.plugins.on_files(get_files(config), config=config)
    assert files.get_file_from_path("reference/table.schema.json")
    assert files.get_file_from_path("repository/benchmarks/results/papers/gbv.md")
    for page in files.documentation_pages():
        text, here = page.content_string, page.src_uri
        links = [link for _, link in hooks.LINK.findall(hooks.rewritten(text, here))]
        inner = [link for link in links if ":" not in link]
        places = [normpath(join(dirname(here), link)) for link in inner]
        assert not [each for each in places if not files.get_file_from_path(each)], here


def test_a_link_to_what_there_is_not_is_left_for_mkdocs_to_refuse(hooks):
    text = "[a](../README.md#from-python) [b](../nowhere.md) [c](https://x.y/z)"
    told = "[a](repository/README.md#from-python) [b](../nowhere.md) [c](https://x.y/z)"
    assert hooks.rewritten(text, "tutorial.md") == told
    assert load_config(str(ROOT / "mkdocs.yml"), plugins=[]).validation.links.not_found > 20
