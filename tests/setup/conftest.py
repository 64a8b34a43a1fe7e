"""A tiny project with the real set-up script, real environments and a real pip, and without a
network.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests import ROOT
from tests.setup.wheel import write_wheel

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny-project"
version = "1.0"
requires-python = ">=3.11,<3.15"
"""
BACKEND = """
from wheel import write_wheel


def get_requires_for_build_editable(config_settings=None):
    return []


def get_requires_for_build_wheel(config_settings=None):
    return []


def build_wheel(folder, config_settings=None, metadata_directory=None):
    return build_editable(folder)


def build_editable(folder, config_settings=None, metadata_directory=None):
    here = __file__.rpartition("/")[0]
    return write_wheel(folder, "tiny_project", "1.0", {"tiny_project.pth": here}, ["Provides-Extra: dev", REQUIRES])


REQUIRES = 'Requires-Dist: thing; extra == "dev"'
"""


class Project:
    """A checkout of the tiny project, and a folder of wheels that pip takes for its index."""

    def __init__(self, folder, wheels):
        self.folder, self.wheels = folder, wheels
        self.environment = folder / ".venv"

    def setup(self, *arguments, python=sys.executable, **variables):
        """Run the set-up script; returns (exit status, what it and pip printed)."""
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "COV_"))
        }
        environment |= {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        } | variables
        command = [python, "tools/setup.py", ".venv", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=-1,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout

    def version_of(self, package):
        """The version that the environment has of a package."""
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.check_output(
            [self.environment / "bin" / "python", "-I", "-c", code], text=True
        ).strip()

    def copy(self, folder):
        """The whole checkout with its environment, as `cp -r` copies it."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder, self.wheels)


def make_project(folder):
    """A checkout without an environment. thing 1.0 and 2.0 are on its index, torch is not."""
    checkout, wheels = folder / "check out", folder / "wheels"
    (checkout / "tools").mkdir(parents=True)
    wheels.mkdir()
    shutil.copy(ROOT / "tools" / "setup.py", checkout / "tools")
    shutil.copy(ROOT / "tests" / "setup" / "wheel.py", checkout)
    (checkout / "pyproject.toml").write_text(PYPROJECT)
    (checkout / "constraints.txt").write_text("thing==1.0\ntorch==3.0\n")
    (checkout / "backend.py").write_text(BACKEND)
    for version in ("1.0", "2.0"):
        write_wheel(wheels, "thing", version, {"thing.py": ""})
    return Project(checkout, wheels)


@pytest.fixture
def project(tmp_path):
    """A checkout without an environment."""
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def ready(tmp_path_factory):
    """A checkout whose environment was made; take a copy to change it."""
    made = make_project(tmp_path_factory.mktemp("ready"))
    status, output = made.setup()
    assert status == 0, output
    made.output = output
    return made
