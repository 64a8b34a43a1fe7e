"""A wrong key, type or name is told without torch, in a process of its own, as a user meets it."""

import json
import subprocess
import sys

import pytest

from tests.pipelines.micro import ROOT, environment

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "pytorch_lightning", "wandb", "datasets", "numpy", "matplotlib")


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_and_types_are_checked_without_heavy_imports():
    code = "import sys, nde_talf.cli, nde_talf.pipelines.run as run; run.check_config(run.Config())"
    assert python(f"{code}; print({{*{HEAVY}}} & {{*sys.modules}})") == "set()\n"


# `nde run ...` for every line of arguments, forked from a process that has imported what it
# imports: that alone takes a second.
SERVER = f"""
import json, os, sys, tempfile
import nde_talf.pipelines.config.command_line, nde_talf.pipelines.run
from hydra import compose, initialize
from nde_talf.cli import main

for line in sys.stdin:
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.argv = ["nde", "run", *json.loads(line)]
        try:
            main()
        finally:
            print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    print(json.dumps([code, *(file.read() for file in files)]), flush=True)
"""


@pytest.fixture(scope="module")
def command():
    """`command(*arguments)` runs `nde run ...`, which must end before anything heavy is imported."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:

        def run(*arguments):
            print(json.dumps(arguments), file=server.stdin, flush=True)
            return subprocess.CompletedProcess(arguments, *json.loads(server.stdout.readline()))

        yield run
        server.stdin.close()


@pytest.mark.parametrize(
    "arguments,status,said",
    [
        (["selector.lrr=1"], 2, "selector.lrr: there is no such key. Did you mean selector.lr?"),
        (["model=tinny3"], 2, "Did you mean model=tiny3?"),
        (["-sc", "install=bash"], 2, "there is no such option"),
        (
            ["data=text", "data.source=/nope.jsonl"],
            1,
            "data.source=/nope.jsonl: there is no such file",
        ),
        (["base=nowhere"], 1, "base=nowhere: there is no run of that name"),
    ],
)
def test_a_mistake_is_told_in_a_paragraph_without_heavy_imports(command, arguments, status, said):
    done = command(*arguments)
    assert done.returncode == status
    assert said in " ".join(done.stdout.replace("│", " ").split()), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.stderr.strip().endswith("[]"), done.stderr


def test_help_needs_no_heavy_imports(command):
    done = command("--help")
    assert (
        done.returncode == 0 and "model=tiny" in done.stdout and done.stderr.strip().endswith("[]")
    )
    assert "hydra-help" not in done.stdout  # it tells of options that are refused


def test_a_command_that_there_is_not_is_usage():
    command = [sys.executable, "-m", "nde_talf.cli", "walk"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "there is no command 'walk'" in done.stderr


@pytest.mark.parametrize("command", ["generate", "check", "recommend"])
def test_help_of_a_command_without_presets_lists_its_keys_alone(command):
    code = (
        f"import sys, nde_talf.pipelines.commands.{command} as command; sys.argv = ['nde', '--help']\n"
        "command.main()"
    )
    told = python(code)
    assert f"Usage: nde {command}" in told and "\nrun: " in told
    assert "sweep" not in told and "tiny3" not in told and "Hydra" not in told


@pytest.mark.parametrize("made", ["data/__init__.py", "selector.py"])
def test_a_users_own_modules_of_our_rooms_names_are_in_nobodys_way(tmp_path, made):
    path = tmp_path / made
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise ImportError('not for the project')\n")
    code = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "import nde_talf.pipelines.run, nde_talf.selector.selector_settings, nde_talf.data.text.settings"
    )
    python(code)
