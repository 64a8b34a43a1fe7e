"""A finished small run that cases damage copies of, and how many of the cases are run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = 250
FRAME = re.compile(r"^.*[─-] error [─-]+|[╭╮╰╯─]+")
"""Everything before a sentence, and the lines around it."""
KIND = re.compile(r"[^ ]*[=/0-9][^ ]*")
"""Words of a sentence that differ from case to case: keys with values, paths, numbers."""
PLACE = re.compile(r"/\S*/pytest-\d+/[^/\s]+")
"""The folder of a test."""
HEAD = """# What bad inputs are told

One sentence of each kind, by group, made by
`pytest -m nightly tests/robustness/test_cases.py --sentences benchmarks/results/refusals.md`. All
cases are rows of `tests/robustness/cases.jsonl`."""


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="run every n-th case alone")
    parser.addoption("--sentences", type=Path, help="write the page of what bad inputs are told")


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    step = config.getoption("every", 1)
    kept = {id(item) for item in here[::step]}
    config.hook.pytest_deselected(items=[item for item in here if id(item) not in kept])
    items[:] = [item for item in items if item not in here or id(item) in kept]


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a corpus and of checkpoints, which hold one finished run, `default`."""
    from tests.pipelines import micro

    folder = tmp_path_factory.mktemp("finished")
    done = micro.run(folder, "model=tiny_ci", "tracking=disabled", "model.threads=1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def sentences(request) -> Iterator[list[tuple[str, str, str]]]:
    """Collect the group, case and sentence of bad inputs, and perhaps write their page."""
    told: list[tuple[str, str, str]] = []
    yield told
    if page := request.config.getoption("--sentences"):
        page.write_text(sentences_page(told))


def sentences_page(told: list[tuple[str, str, str]]) -> str:
    """A table by group of sentences that differ in more than their numbers, up to WORDS a group."""
    lines = [HEAD]
    for group in dict.fromkeys(group for group, _, _ in told):
        plain = [
            (case, PLACE.sub("RUNS", FRAME.sub(" ", text)).strip())
            for at, case, text in told
            if at == group
        ]
        rows = {KIND.sub("", text): (case, text) for case, text in plain}
        count = sum(at == group for at, _, _ in told)
        lines += [
            "",
            f"## {group.capitalize()}: {count} cases",
            "",
            "| input | sentence |",
            "|---|---|",
        ]
        words = 0
        for case, text in rows.values():
            row = f"| `{case[:60]}` | {text[:400]} |".replace("\n", " ")
            words += len(row.split())
            if words > WORDS:
                break
            lines.append(row)
    return "\n".join(lines) + "\n"
