"""Circumstances of a measurement: date, command, code, machine and versions, as text."""

import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nde_talf.decoding.common.processor import cpu_model

ROOT = Path(__file__).resolve().parents[1]


def environment(device: str, dtype: str, threads: int) -> dict[str, str]:
    """Return all circumstances by name. threads: of the CPU while timing."""
    return {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": command(),
        "code": code(),
        "conditions": conditions(device, dtype, threads),
        "CPU": f"{cpu_model()} ({platform.machine()})",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
    }


def command() -> str:
    """Return the command of this process, with arguments added from a run's record.

    Absolute paths are cut to their last name: it runs in the folder that holds them.
    """
    place = r"^(\w[\w.]*=)['\"]?/(?:.*/)?([^/'\"]*)/?['\"]?$"
    given = [re.sub(place, r"\1\2", each) for each in sys.argv[1:]]
    name = Path(sys.argv[0]).name
    return shlex.join([*("nde run" if name == "run.py" else name).split(), *given])


def conditions(device: str, dtype: str, threads: int) -> str:
    """Return batch size, dtype and machine as a phrase."""
    machine = f"{cpu_model()}, {threads} thread{'' if threads == 1 else 's'}"
    if device.startswith("cuda"):
        machine = torch.cuda.get_device_name(device)
    return f"batch size 1, {dtype}, {machine}"


def code() -> str:
    """Return the source tree's commit, marked dirty after changes, or the package's version."""
    if (ROOT / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            commit = _git("rev-parse", "--short=12", "HEAD")
            changes = _git("status", "--porcelain", "--untracked-files=no")
            return f"commit {commit}{'-dirty' if changes else ''}"
    with suppress(PackageNotFoundError):
        return f"version {version('nde-talf')}"
    return "unknown version"


def _git(*question: str) -> str:
    """Run a git command that writes nothing (describe and diff would write an index)."""
    asked = ["git", "--no-optional-locks", *question]
    return subprocess.check_output(
        asked, cwd=ROOT, text=True, timeout=10, stderr=subprocess.DEVNULL
    ).strip()
