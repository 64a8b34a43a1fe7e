"""README and docs run as printed: a page's python blocks in order in one namespace, beside a
finished run; its command lines are configurations that pass every check made before work starts.
"""

import importlib.util
import re
import shlex
import shutil
from itertools import chain
from pathlib import Path

import pytest

import nde_talf.pipelines.run
from nde_talf.data.text.settings import FILE_FORMATS
from nde_talf.data.text.shipped import SHIPPED
from nde_talf.decoding.common.settings import NAME, keys
from nde_talf.decoding.registry import FAMILIES, POLICIES, VERIFIERS
from nde_talf.draft_training.registry import HEADS, LOSSES
from nde_talf.pipelines.commands.check import CheckConfig
from nde_talf.pipelines.commands.export import ExportConfig, export
from nde_talf.pipelines.commands.generate import (
    GenerateConfig,
    _generate_given,
    completed,
    without_prompt,
)
from nde_talf.pipelines.commands.recommend import RecommendConfig, recommend
from nde_talf.pipelines.commands.recommend import completed as probed
from nde_talf.pipelines.config.checks import check_config
from nde_talf.pipelines.config.command_line import composed, presets
from nde_talf.pipelines.config.own_data import in_full
from nde_talf.pipelines.config.schema import Config
from recipes.small.steps import SmallConfig
from tests.pipelines.micro import MICRO, ROOT, write_corpus
from tests.refusal import refusal

PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "checkpoints" / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PLACEHOLDERS = {
    "FOLDER_OR_HUB_NAME": "org/model",
    "PROMPTS": "prompts.jsonl",
    "$stage": "traces",
}
SETTING = r"\+?[a-z_][\w./]*="


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


SCHEMAS = {
    "generate": GenerateConfig,
    "recommend": RecommendConfig,
    "check": CheckConfig,
    "export": ExportConfig,
    "small": SmallConfig,
}


def configured(arguments: list[str], config: str = "config"):
    return composed(SCHEMAS.get(config, Config), *in_full(arguments), config=config)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with the shipped pair, a finished run called default, as far as pages use it, and
    the files that commands name.
    """
    home = tmp_path_factory.mktemp("home")
    write_corpus(home / "corpus.jsonl")
    here = [
        f"data.source={home}/corpus.jsonl",
        f"paths.checkpoints={home}/checkpoints",
        "tracking=disabled",
    ]
    for stage in ("pair", "latency", "traces", "selector", "draft"):
        nde_talf.pipelines.run.run(configured([*MICRO, *here, f"stage={stage}"]))
    shutil.copytree(SHIPPED, home / "checkpoints/small")
    (home / "checkpoints/mine/pair").mkdir(parents=True)  # the pages' name of a run to build on
    (home / "checkpoints/eagle/draft/export").mkdir(parents=True)  # and of a head to start from
    (home / "checkpoints/mine/pair/manifest.json").write_text("{}")
    table = (home / "checkpoints/default/latency/table.json").read_text()
    for file, text in (
        ("my_table.json", table),
        ("chats.jsonl", "{}\n"),
        ("prompts.jsonl", "{}\n"),
    ):
        (home / file).write_text(text)
    return home


def blocks(page: Path) -> list[str]:
    """Its python blocks, each moved down to its line on the page, so that an error names that line."""
    text = page.read_text()
    marked = [
        (match, text[: match.start(2)].count("\n"))
        for match in BLOCK.finditer(text)
        if match[1] == "python"
    ]
    return ["\n" * line + match[2] for match, line in marked]


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_a_pages_python_runs_from_top_to_bottom(page, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    for registry in (VERIFIERS, POLICIES, LOSSES, HEADS, FAMILIES):  # what a page adds is its own
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    names: dict = {"__name__": "page"}
    for code in blocks(page):
        exec(compile(code, name(page), "exec"), names)
    if page.name == "README.md":  # its snippet shows that it works
        printed = capsys.readouterr().out
        assert printed.startswith("def main():") and len(printed) > len("def main():\n")


def test_only_what_needs_vllm_is_not_run():
    others = [match for page in PAGES for match in BLOCK.findall(page.read_text()) if match[0]]
    assert all("vllm" in code for language, code in others if language != "python")


def test_every_public_name_has_an_example():
    code = "".join(chain.from_iterable(map(blocks, WITH_CODE)))
    assert not [each for each in nde_talf.__all__ if not re.search(rf"\b{each}\b", code)]


def commands(page: Path) -> list[str]:
    """Its command lines of this project, a line each, without comments."""
    text = page.read_text()
    shown = [match[2] for match in BLOCK.finditer(text) if match[1] != "python"]
    inline = re.findall(
        r"`((?:python -m benchmarks|nde (?:run|generate|check|recommend|export) )[^`]*)`",
        BLOCK.sub("", text),
    )
    lines = chain.from_iterable(
        block.replace("\\\n", " ").splitlines() for block in [*shown, *inline]
    )
    lines = [re.sub(r"^.*(?:&& |; do )|; done$", "", line) for line in lines]
    lines = [line.removeprefix(".venv/bin/") for line in lines]
    lines = [re.sub(r"^nde run\b", "python -m pipelines.run", line) for line in lines]
    lines = [re.sub(r"^nde (\w+)", r"python -m pipelines.commands.\1", line) for line in lines]
    lines = [re.sub(r"^python -m nde_talf\.", "python -m ", line) for line in lines]
    rooms = r"python -m (pipelines|benchmarks|evaluation|recipes)\."
    return [line.split("  #")[0].strip() for line in lines if re.match(rooms, line)]


def variants(line: str) -> list[list[str]]:
    """The arguments of a command line: as it stands without what is in [brackets], with all of it,
    and with each a|b|c.
    """
    for placeholder, value in PLACEHOLDERS.items():
        line = line.replace(placeholder, value)
    line = line.replace('="..."', "=text")
    readers = {"generate": completed, "recommend": probed}
    read = next((reader for name, reader in readers.items() if name in line), without_prompt)
    options, rest = [], ""
    while match := re.search(rf"(?:^|\s)\[(?={SETTING})", line):
        end, depth = match.end(), 1
        while depth:
            depth += {"[": 1, "]": -1}.get(line[end], 0)
            end += 1
        options.append(line[match.end() : end - 1])
        rest, line = rest + line[: match.start()] + " ", line[end:]
    words = read(shlex.split(rest + line))
    plain = [word for word in words if re.match(SETTING, word) and not word.endswith("=...")]
    choices = [
        (key, values.split("|"))
        for key, _, values in (option.partition("=") for option in options)
        if "|" in values
    ]
    every = [
        plain,
        *(
            [*plain, f"{key}={value}"]
            for key, values in choices
            for value in values
            if value != "..."
        ),
    ]
    return [*every, [*plain, *(option for option in options if "|" not in option)]]


COMMANDS = [(name(page), line) for page in PAGES for line in commands(page)]


@pytest.mark.long
@pytest.mark.parametrize("page,line", COMMANDS, ids=lambda x: re.sub(r"\W+", "-", x)[:60])
def test_a_command_line_names_what_there_is(page, line, home, monkeypatch):
    """As far as it can be seen without work: with vLLM and Ray taken as there, and nothing loaded
    from a hub.
    """
    monkeypatch.chdir(home)
    module = line.split()[2]
    assert importlib.util.find_spec(module) or module == "benchmarks.NAME"
    room, *_, command = module.split(".")
    if room in ("pipelines", "recipes") and command in SCHEMAS:
        for arguments in variants(line):
            configured(arguments, command)
    if module == "pipelines.run":
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: name in ("vllm", "ray") or find(name, *rest),
        )
        for arguments in variants(line):
            if any(word.startswith("+sweep=") for word in arguments):
                arguments = [*arguments, "run=sweep-0"]  # a job's number, which Hydra gives
            check_config(configured(arguments))


RUN = {"generate": _generate_given, "recommend": recommend, "export": export}
OTHERS = re.compile(r"run=(mine|own|NAME)|smollm2|=\.\.\.|data=|while_sure")
"""Not at home, a form of words, or the reader's own."""
RUNNABLE = [
    each
    for each in COMMANDS
    if each[1].split()[2].rpartition(".")[2] in RUN and not OTHERS.search(each[1])
]


@pytest.mark.nightly
@pytest.mark.parametrize("page,line", RUNNABLE, ids=lambda x: re.sub(r"\W+", "-", x)[:60])
def test_a_command_line_runs(page, line, home, monkeypatch, tmp_path):
    """With the shipped pair, and few tokens."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))  # prices are measured once
    monkeypatch.setitem(PLACEHOLDERS, "FOLDER_OR_HUB_NAME", "checkpoints/small/pair/target")
    command = line.split()[2].rpartition(".")[2]
    short = ["new_tokens=8"] if command == "generate" else []
    config = configured([*variants(line)[0], *short], command)
    if "policy=beam verifier=specinfer" in line:  # shown for its message
        with refusal("verifier"):
            RUN[command](config)
    else:
        RUN[command](config)


def test_code_and_commands_of_the_pages_are_found():
    shown = "".join(chain.from_iterable(map(blocks, WITH_CODE)))
    for each in ("@rule", "@policy", "@loss", "head_layer", "@family"):
        assert f"{each}(" in shown
    assert ("README.md", "pipelines.run") in {(page, line.split()[2]) for page, line in COMMANDS}


LINKED = [*PAGES, ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_and_named_files_are_there(page):
    """Relative links, and every `folder/file.py` that a page names."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", BLOCK.sub("", text))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|yaml))`", text)
    assert not broken and not [path for path in named if not (ROOT / path).exists()]


def test_every_page_is_on_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in site]


KEYS = [*keys(Config), *chain.from_iterable(map(keys, SCHEMAS.values()))]
TOP = {key.partition(".")[0] for key in KEYS}
GROUPS = {key.rpartition(".")[0] for key in KEYS} | {"options"}
OPEN = {"options", "evaluation.policies", "data.mix", "data.sets"}
PRESETS = {path.name for path in (ROOT / "configs").iterdir() if path.is_dir()}


def is_key(name: str) -> bool:
    """Whether a configuration has this key, as in `data.sets.file.source`, or this group, as in
    `model.draft_lm.*`.
    """
    patterns = [(re.escape(key).replace(NAME, r"[\w-]+"), key in OPEN) for key in KEYS]
    return any(
        re.fullmatch(rf"{key}(\.\w+){{0,2}}" if is_open else key, name.removesuffix(".*"))
        for key, is_open in patterns
    )


def is_code(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one:
    `nde_talf.data.engines.vllm_speculation`, `nde_talf.data.text`.
    """
    folder, _, inner = name.partition(".")
    path = ROOT / folder / inner.split(".")[0]
    return path.is_dir() or path.with_suffix(".py").exists() or inner == "safetensors"


def unknown(span: str) -> list[str]:
    """The keys and presets in a code span or command line that are none."""
    dotted = re.findall(r"(?<![\w./])[a-z_]+(?:\.[\w*]+)+", span)
    assigned = (
        []
        if "(" in span
        else re.findall(r"(?<![\w.])([a-z_]+)=(?!True|False|None)([^\s\"'`]*)", span)
    )
    wrong = [
        name
        for name in dotted
        if name.split(".")[0] in GROUPS and not is_key(name) and not is_code(name)
    ]
    wrong += [key for key, _ in assigned if key not in TOP | PRESETS]
    for group, value in assigned:
        known = [*presets(group), NAME] if group in PRESETS else []
        wrong += [
            f"{group}={preset}"
            for preset in re.findall(r"[\w-]+(?:\.[\w-]+)*", value)
            if known and preset not in known and Path(preset).suffix not in FILE_FORMATS
        ]
    return wrong


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_keys_and_presets_are_there(page):
    """In code spans and in command lines, as far as [optional] parts of these too."""
    text = page.read_text()
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    shown = [
        line
        for match in BLOCK.finditer(text)
        if match[1] != "python"
        for line in match[2].replace("\\\n", " ").splitlines()
    ]
    lines = [
        line.split(" #")[0]
        for line in shown
        if re.search("pipelines|recipes|nde (run|generate)", line)
    ]
    assert not [wrong for span in [*spans, *lines] for wrong in unknown(span)]


def test_a_wrong_key_or_preset_is_found():
    assert unknown("draft.depth=3 traces.sample draft=paper000 data=[gsm8k,gsm9k] lenght=3 run=mine") == [
        "draft.depth", "traces.sample", "lenght", "draft=paper000", "data=gsm9k"
    ]  # fmt: skip
    assert not unknown("data=[nde,file] model.target_lm.steps=2 options.k=2")
