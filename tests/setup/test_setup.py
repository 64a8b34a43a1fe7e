"""The set-up script against what a machine may hold: nothing, a good environment, a broken one,
somebody else's.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.setup.wheel import write_wheel

sys.path.insert(0, str(ROOT / "tools"))
import resolve
import setup

pytestmark = pytest.mark.slow

sys.path.pop(0)


@pytest.mark.slow
def test_an_environment_is_made_as_the_constraints_say_and_how_to_enter_it_is_told(ready):
    assert ready.version_of("thing") == "1.0"  # 2.0 is newer
    assert "Setting up .venv: it is not there yet." in ready.output
    assert "torch 3.0 comes from the package index" in ready.output
    assert "source .venv/bin/activate" in ready.output


@pytest.mark.slow
def test_a_ready_environment_is_left_alone(ready):
    before = (ready.environment / ".installed").stat().st_mtime_ns
    assert ready.setup() == (0, "")
    assert (ready.environment / ".installed").stat().st_mtime_ns == before


def state(project, torch_index="", asked=None):
    """What the script would do in a checkout: (step, reason)."""
    stamp = json.loads((project.environment / ".installed").read_text() or "{}")
    return setup.state(str(project.environment), "dev", stamp.get("inputs"), torch_index, asked)


@pytest.mark.slow
def test_what_would_be_done_with_an_environment(ready, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "ROOT", str(ready.folder))
    assert state(ready) == ("ready", "")
    assert state(ready, asked=sys.version_info[:2]) == ("ready", "")
    assert state(ready, asked=(3, 99)) == (
        "make",
        "has Python {}.{}, and 3.99 is asked for".format(*sys.version_info[:2]),
    )
    assert state(ready, torch_index="elsewhere") == ("make", "has torch from the package index")

    copy = ready.copy(
        tmp_path / "copy"
    )  # as `cp -r` copies it: it would run the other folder's code
    monkeypatch.setattr(setup, "ROOT", str(copy.folder))
    assert state(copy) == ("make", f"is not of this folder: it runs the project in {ready.folder}")

    stamp = json.loads((copy.environment / ".installed").read_text())
    setup.write_stamp(str(copy.environment), stamp | {"python": [3, 1]})
    assert state(copy)[1].startswith("is broken: its Python was 3.1 and is 3.")
    (copy.environment / "bin" / "python").unlink()
    assert state(copy) == ("make", "is broken: its Python does not run")
    (copy.environment / ".installed").write_text("")
    assert state(copy) == ("make", "was left half made, or an older set-up made it")


@pytest.mark.slow
def test_packages_that_are_missing_or_newly_asked_for_are_installed_in_place(ready, tmp_path):
    folder = ready.folder.rename(
        tmp_path / "aside"
    )  # the environment names this path, so the copy must lie there
    copy = type(ready)(folder, ready.wheels).copy(ready.folder)
    try:
        python = copy.environment / "bin" / "python"
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "thing"], check=True)
        status, output = copy.setup()
        assert status == 0 and "it lacks thing" in output and copy.version_of("thing") == "1.0"
        (copy.folder / "constraints.txt").write_text("thing==2.0\ntorch==3.0\n")
        status, output = copy.setup()
        assert (
            status == 0
            and "it is older than pyproject.toml, constraints.txt or a package" in output
            and copy.version_of("thing") == "2.0"
        )
    finally:
        shutil.rmtree(ready.folder)
        folder.rename(ready.folder)


@pytest.mark.slow
def test_a_set_up_that_was_killed_is_begun_again(project):
    environment = os.environ | {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(project.wheels),
        "PIP_CONFIG_FILE": "/dev/null",
    }
    command = [sys.executable, "tools/setup.py", ".venv"]
    running = subprocess.Popen(
        command, cwd=project.folder, env=environment, start_new_session=True, stdout=-3
    )
    while not (project.environment / "bin" / "python").exists():
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    status, output = project.setup()
    assert status == 0 and "it was left half made" in output
    assert project.version_of("thing") == "1.0"


@pytest.mark.slow
def test_what_somebody_else_made_is_moved_aside_and_a_failure_leaves_nothing(project):
    project.environment.mkdir()
    (project.environment / "notes.txt").write_text("mine")
    (project.folder / "constraints.txt").write_text("thing==7.5\ntorch==3.0\n")
    status, output = project.setup()
    assert status == 1 and "it was not made by this set-up" in output
    assert (project.folder / ".venv.before" / "notes.txt").read_text() == "mine"
    assert re.search(
        r"The index has no thing 7.5 \(it has (1.0, 2.0|2.0, 1.0)\) for this Python and machine",
        output,
    )
    assert not list(project.environment.iterdir())


def pip_says(ready, constraints, folder, **variables):
    """The paragraph about why pip cannot install the tiny project under these constraints; nothing
    is installed.
    """
    (folder / "pins.txt").write_text(constraints)
    environment = os.environ | {"PIP_CONFIG_FILE": "/dev/null"} | variables
    command = [
        "install",
        "--dry-run",
        "--ignore-installed",
        "-c",
        str(folder / "pins.txt"),
        f"{ready.folder}[dev]",
    ]
    with pytest.raises(setup.SetupError) as caught:
        setup.pip(str(ready.environment), command, environment=environment)
    return str(caught.value)


@pytest.mark.slow
def test_a_conflict_names_both_sides(ready, tmp_path):
    write_wheel(tmp_path, "thing", "1.0", {"thing.py": ""}, ["Requires-Dist: other<2"])
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path, "other", version, {"other.py": ""})
    said = pip_says(
        ready, "thing==1.0\nother==2.0\n", tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)
    )
    assert re.fullmatch(
        r"  thing 1.0 depends on other<2\n  The user requested \(constraint\) other==2.0",
        said.partition("\n")[2],
    )


@pytest.mark.slow
def test_no_network_is_said(ready, tmp_path):
    variables = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "1",
    }
    assert "The package index was not reached (NewConnectionError at /simple/thing/)" in pip_says(
        ready, "", tmp_path, **variables
    )


@pytest.mark.slow
def test_a_cpu_build_that_the_index_has_not_is_said(ready, tmp_path):
    write_wheel(tmp_path, "thing", "1.0", {"thing.py": ""}, ["Requires-Dist: torch==3.0+cpu"])
    said = pip_says(ready, "thing==1.0\n", tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert (
        "No matching distribution found for torch==3.0+cpu" in said
        and "make ... TORCH_INDEX=" in said
    )


@pytest.mark.slow
def test_torch_comes_from_its_own_index_where_one_is_named(project, tmp_path):
    builds = tmp_path / "builds"
    builds.mkdir()
    write_wheel(builds, "torch", "3.0+cpu", {"torch.py": ""})
    status, output = project.setup("--torch-index", str(builds))
    assert (
        status == 0 and project.version_of("torch") == "3.0+cpu" and "package index" not in output
    )
    assert project.setup() == (0, "")  # and it stays where none is named
    (builds / "torch-3.0+cpu-py3-none-any.whl").unlink()
    (project.folder / "constraints.txt").write_text("thing==1.0\ntorch==4.0\n")
    status, output = project.setup()
    assert (
        status == 1
        and f"TORCH_INDEX={builds} has no such torch for this Python and machine." in output
    )


@pytest.mark.parametrize(
    ("version", "words"),
    [((3, 10), "Python 3.10 is too old"), ((3, 15), "Python 3.15 is too new"), ((2, 7), "too old")],
)
def test_a_python_out_of_range_is_refused(version, words):
    with pytest.raises(
        setup.SetupError, match=words + ".*runs on 3.11 to 3.14.*make PYTHON=python3"
    ):
        setup.check_python(version, (3, 11), (3, 15))


@pytest.mark.parametrize("version", [(3, 11), (3, 14)])
def test_a_python_in_range_is_taken(version):
    setup.check_python(version, (3, 11), (3, 15))


@pytest.mark.slow
def test_a_python_without_ensurepip_is_told_what_to_install(project, tmp_path):
    (tmp_path / "ensurepip.py").write_text(
        "raise ImportError('No module named ensurepip', name='ensurepip')"
    )
    status, output = project.setup(PYTHONPATH=str(tmp_path))
    assert status == 1 and "has no module ensurepip" in output and "-venv" in output
    assert not project.environment.exists()


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write to"
)
def test_a_folder_that_cannot_be_written_to_is_named():
    with pytest.raises(
        setup.SetupError, match=r"^/proc cannot be written to .*copy or clone the project"
    ):
        setup.check_machine("/proc/.venv")


def test_the_password_of_an_index_is_not_shown():
    assert setup.shown("https://name:secret@host/simple") == "https://***@host/simple"


def test_constraints_pin_torch_and_nothing_of_its_build():
    pins = resolve.read_pins()
    assert resolve.pinned_torch(pins) and not [
        pin for pin in pins if resolve.TORCH_BUILD.match(pin)
    ]
    assert resolve.TORCH_BUILD.match("triton==3.9.0") and not resolve.TORCH_BUILD.match(
        "torch==2.13.0"
    )


@pytest.mark.slow
def test_the_stamp_says_complete_last(ready):
    stamp = json.loads((ready.environment / ".installed").read_text())
    assert stamp["complete"] and stamp["python"] == list(sys.version_info[:2])
