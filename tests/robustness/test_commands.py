"""Command lines that cannot work: each ends in one paragraph that holds the expected words.

A line of commands.jsonl is a command with its arguments; FILES stands for the folder of what
files.json lists, and `default` is a finished run.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import nde_talf.pipelines.generate
import nde_talf.pipelines.run
from tests.pipelines import micro
from tests.robustness import child

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "commands.jsonl").read_text().splitlines()]
MAINS = {"run": nde_talf.pipelines.run.main, "generate": nde_talf.pipelines.generate.main}


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, file in json.loads((HERE / "files.json").read_text()).items():
        (folder / name).parent.mkdir(exist_ok=True)
        content = file["text"].encode(file.get("encoding", "utf-8")) * file.get("times", 1)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case["arguments"])[:80])
def test_a_command_that_cannot_work_says_why(case, finished, files, tmp_path):
    runs = finished / "checkpoints"
    arguments = [argument.replace("FILES", str(files)) for argument in case["arguments"]]
    if "run=chats" in arguments:  # on the finished run's pair
        arguments = [*micro.command(finished)[3:], *arguments]
    if not any(argument.startswith("paths.checkpoints=") for argument in arguments):
        arguments.append(f"paths.checkpoints={runs}")

    def command() -> None:
        os.environ |= micro.environment()
        sys.argv = [case["command"], *arguments]
        MAINS[case["command"]]()

    outcome = child.run(command, tmp_path, seconds=120)
    for left in set(runs.iterdir()) - {runs / "default"}:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert outcome.kind == child.TOLD, outcome.text[-1000:]
    assert case["words"].replace(" ", "") in outcome.text.replace(" ", ""), outcome.text[-1000:]
