"""What SECURITY.md states."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from nde_talf import UserError
from nde_talf.decoding.common.card import write_card
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.pipelines.config.command_line import fail
from nde_talf.pipelines.config.schema import Config, ModelConfig, RayConfig, TrackingConfig
from nde_talf.pipelines.runs.finished import COMMAND, Run
from nde_talf.pipelines.runs.manifest import plain
from nde_talf.pipelines.runs.tracking import Tracker, tracked
from tests import ROOMS, ROOT
from tests.refusal import refusal

CALLS = [
    (path.relative_to(ROOT), node)
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Call)
]


def named(call, name):
    """The source of a keyword argument."""
    return next((ast.unparse(word.value) for word in call.keywords if word.arg == name), None)


def test_nothing_is_unpickled_and_no_remote_code_is_asked_for():
    loads, pretrained = 0, 0
    for path, call in CALLS:
        name = ast.unparse(call.func)
        assert name not in (
            "eval",
            "exec",
            "pickle.load",
            "np.load",
            "numpy.load",
            "yaml.load",
            "joblib.load",
        ), (path, name)
        if name.endswith(
            ("pickle.loads", "pickle.dumps")
        ):  # the class of Ray's workers, which this process has made
            assert path == Path("decoding/common/parallel.py"), path
        if name == "torch.load":
            loads += 1
            assert named(call, "weights_only") == "True", path
        if re.search(r"\.from_pretrained$|\bLLM$", name) and re.search(r"Auto|auto|LLM", name):
            pretrained += 1
            patterns = (
                path == Path("pipelines/stages/pair.py") and ast.unparse(call.args[0]) == "out"
            )  # a model that was just trained here
            assert patterns or named(call, "trust_remote_code") == "False", (path, name)
        assert named(call, "trust_remote_code") in (None, "False"), path
    assert loads > 2 and pretrained > 5


@pytest.mark.parametrize("name", ["../..", "/abs", "", "../default"])
def test_a_run_is_a_plain_name_in_both_commands(tmp_path, name):
    (tmp_path / "default/pair").mkdir(parents=True)
    (tmp_path / "default/pair/pair.json").write_text("{}")
    with refusal("run="):
        Config(run=name)
    with refusal("run="):
        Run(name, str(tmp_path))
    write_json(tmp_path / "default" / COMMAND, {"base": name, "arguments": []})
    if name:
        with refusal("base="):
            Run("default", str(tmp_path))


def test_samples_false_leaves_texts_and_paths_out_of_what_is_recorded(tmp_path, monkeypatch):
    recorded = []
    monkeypatch.setattr("wandb.init", lambda **given: recorded.append(given) or Mock())
    model = ModelConfig(target="/secret/a")
    for samples in (True, False):
        config = Config(model=model, tracking=TrackingConfig(samples=samples))
        with tracked(config, "pair", tmp_path):
            assert ("secret" in json.dumps(recorded.pop()["config"])) == samples

    (tmp_path / "index.html").write_text("a text")
    for samples in (True, False):
        run = Mock()
        tracker = Tracker(run, tmp_path, samples)
        tracker.report(tmp_path)
        assert ("report" in run.log.call_args[0][0]) == samples


def test_the_projects_own_name_is_nowhere_a_bare_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not [
        line
        for lines in (project["dependencies"], *extras.values())
        for line in lines
        if line.startswith("nde")
    ]
    missing = {*extras["docs"]} - {*extras["dev"]}
    assert not missing, f"dev includes docs: {missing}"
    installs = re.compile(r"pip install[^\n`]*\bnde[-_]talf")
    files = [
        path for kind in ("*.md", "*.txt", "*.yml", "Makefile", "*.py") for path in ROOT.glob(kind)
    ]
    files += [*(ROOT / "docs").rglob("*.md"), ROOT / ".ci/run"]
    assert not [path for path in files if installs.search(path.read_text())]
    assert not re.search(r"^nde", (ROOT / "constraints.txt").read_text(), re.M)


SECRETS = [
    "https://user:hunter2@host/x.jsonl",
    "s3://hunter2@bucket/x",
    "https://host/x?X-Amz-Signature=hunter2&part=1",
    "org/name?hf_hunter2hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_masked_where_they_are_shown_or_stored(tmp_path, monkeypatch, capsys, text):
    recorded = []
    monkeypatch.setattr("wandb.init", lambda **given: recorded.append(given) or Mock())
    config = Config(ray=RayConfig(text))
    with tracked(config, "pair", tmp_path):
        recorded.append(plain({"ray": config.ray}))
    recorded.append(str(UserError(f"data.source={text}: there is none")))
    console.print(f"! {text}")
    with pytest.raises(SystemExit):
        fail(f"{text} cannot be read")
    write_card(tmp_path, "A head", "", "", [], None, {"text": text})
    recorded += [capsys.readouterr().out, (tmp_path / "README.md").read_text()]
    assert "***" in str(recorded) and "hunter2" not in str(recorded)


@pytest.mark.slow
def test_a_command_line_is_masked_before_anything_logs_it_and_in_tracebacks():
    code = """
import sys
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.schema import Config
def work(config):
    assert "hunter2" in config.ray.address
    print(sys.argv)
    raise RuntimeError(config.ray.address)
sys.argv = ["run", f"ray.address={sys.argv[1]}"]
launch("config", Config, work)
"""
    command = [sys.executable, "-c", code, SECRETS[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1 and "RuntimeError: https://***@host" in done.stderr
    assert "***@host" in done.stdout and "hunter2" not in done.stdout + done.stderr
