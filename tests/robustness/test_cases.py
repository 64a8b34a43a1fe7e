"""Bad inputs, each a row of cases.jsonl: it ends in one sentence that names the fault's key or file.

A row is a command line, the reading of an artefact (`load`) or a call of the API (`call`), perhaps
after a `change` of a finished run, `default`. FILES stands for the folder of what files.json lists.
"""

import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest

import nde_talf.pipelines.commands.check
import nde_talf.pipelines.commands.generate
import nde_talf.pipelines.commands.recommend
import nde_talf.pipelines.run
from nde_talf.evaluation.benchmark import Record, read_records
from nde_talf.pipelines.commands.quiet import quiet, show_warning
from nde_talf.pipelines.runs.finished import COMMAND
from nde_talf.pipelines.stages import draft, evaluate, latency, pair, selector, traces
from tests import ROOT
from tests.evaluation.example import everything
from tests.pipelines import micro
from tests.robustness import child
from tests.robustness.calls import call, prepared
from tests.robustness.damage import LOADERS, apply

HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "cases.jsonl").read_text().splitlines()]
MAINS = {
    "check": nde_talf.pipelines.commands.check.main,
    "run": nde_talf.pipelines.run.main,
    "generate": nde_talf.pipelines.commands.generate.main,
    "recommend": nde_talf.pipelines.commands.recommend.main,
}
STAGES = (pair, latency, traces, selector, draft, evaluate)
"""Imported before a process is forked, which then need not."""
MODEL = re.compile("model=")
PLACES = {
    "selector": "selector/export/traversal",
    "head": "draft/export",
    "latency": "latency/table.json",
    "decode": "pair",
    "records": "report/records.jsonl",
}
"""Paths in a run of what `load` names, where it is not the name itself."""


def make_files(folder):
    """Write the files of files.json."""
    for name, file in json.loads((HERE / "files.json").read_text()).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "how" in file:
            path.write_bytes(file.get("text", "").encode())
            apply(file, path)
        else:
            content = file["text"].encode(file.get("encoding", "utf-8")) * file.get("times", 1)
            path.write_bytes(content)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


def spelt_out(argument):
    """An argument; ["a=", "[", 3, "]"] is "a=[[[]"."""
    if isinstance(argument, str):
        return argument
    start, repeated, times, end = argument
    return start + repeated * times + end


def command(case, runs, corpus, files):
    """Run a command line in this process; corpus: the folder of the text of `runs`."""
    warnings.showwarning = show_warning  # pytest has its own
    arguments = [spelt_out(argument).replace("FILES", str(files)) for argument in case["arguments"]]
    if "run=chats" in arguments or (case["command"] == "run" and "change" in case):
        arguments = [*micro.command(corpus)[3:-1], *arguments]  # its settings but paths.checkpoints
    options = any(each.startswith("-") for each in arguments)
    if case["command"] == "run" and not options and not any(map(MODEL.match, arguments)):
        arguments.append("model=tiny_ci")
    if case["command"] != "run" and not any(each.startswith("run=") for each in arguments):
        arguments.append("run=default")
    if not options and not any(each.startswith("paths.checkpoints=") for each in arguments):
        arguments.append(f"paths.checkpoints={runs}")
    os.environ |= {**micro.environment(), **case.get("environment", {})}
    sys.argv = [case["command"], *arguments]
    MAINS[case["command"]]()


def load(what, run):
    """Read an artefact of a run."""
    path = run / PLACES.get(what, what)
    if what == "records":
        everything(list(read_records(path)))
    else:
        LOADERS[what](path)


def outcome(case, finished, files, folder):
    """Run a case in a process of its own."""
    runs = finished / "checkpoints"
    if "call" in case:
        prepared(runs / "default")
    if "change" in case:
        ignored = shutil.ignore_patterns("training", "curves", "wandb")
        shutil.copytree(runs / "default", folder / "checkpoints/default", ignore=ignored)
        runs = folder / "checkpoints"
        for change in case["change"]:
            apply(change, runs / "default" / change["file"])

    remembered = (finished / "checkpoints/default" / COMMAND).read_bytes()

    def work():
        if "command" in case:
            command(case, runs, finished, files)
        elif "load" in case:
            quiet()
            load(case["load"], runs / "default")
        else:
            quiet()
            call(case["call"], case["given"], runs / "default")

    limits = {key: case[key] for key in ("seconds", "largest_file", "encoding") if key in case}
    ended = child.run(work, folder, child.Limits(**{"seconds": 60, "memory": 6 << 30, **limits}))
    (finished / "checkpoints/default" / COMMAND).write_bytes(remembered)
    for left in set(runs.iterdir()) - {runs / "default"}:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return ended


def fault(case, ended):
    """Say what is wrong with how a case ended; None if nothing is."""
    expected = child.WORKS if case.get("works") else child.TOLD
    if ended.kind != expected:
        return f"{ended.kind}, not {expected}"
    missing = case.get("names", "").replace(" ", "") not in ended.text.replace(" ", "")
    return f"it does not name {case['names']!r}" if missing else None


def label(case):
    """A case in one line."""
    done = " ".join(map(str, case.get("arguments", ()))) or case.get("load") or case.get("call", "")
    given = json.dumps(case["given"]) if "given" in case else ""
    changes = [json.dumps(change) for change in case.get("change", ())]
    return " ".join([case.get("command", ""), done, given, *changes]).strip()


def told_or_works(case, ended):
    wrong = fault(case, ended)
    assert wrong is None, f"{wrong}: {ended.text[-1000:]}"


@pytest.fixture(scope="session")
def unfinished(tmp_path_factory):
    """A folder as `finished`, whose run holds only what takes no models to make."""
    folder = tmp_path_factory.mktemp("unfinished")
    run = folder / "checkpoints/default"
    (run / "report").mkdir(parents=True)
    (run / "latency").mkdir()
    (run / COMMAND).write_text(json.dumps({"arguments": [], "base": None}))
    shutil.copy(ROOT / "tests/fixtures/latency.json", run / PLACES["latency"])
    line = Record("temperature 0.6", "nss", "p", "code", 4, 2, 9, 0.5).line()
    (run / PLACES["records"]).write_text(f"{line}\n" * 2)
    return folder


QUICK = [case for case in CASES if case.get("quick")]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK, ids=lambda case: label(case)[:80])
def test_a_bad_input_that_needs_no_models_is_told(case, unfinished, files, tmp_path):
    told_or_works(case, outcome(case, unfinished, files, tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: label(case)[:80])
def test_a_bad_input_is_told(case, finished, files, tmp_path):
    told_or_works(case, outcome(case, finished, files, tmp_path))
