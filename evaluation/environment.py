"""What a measurement was made with: date, command, code, machine and versions, as text."""

import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "numpy")


def environment(device: str, dtype: str, threads: int) -> dict[str, str]:
    """threads: of the CPU while timing."""
    return {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": command(),
        "code": code(),
        "device": (
            f"{device}, {torch.cuda.get_device_name(device)}"
            if device.startswith("cuda")
            else device
        ),
        "CPU": f"{cpu_model()} ({platform.machine()}), {in_threads(threads)} while timing",
        "dtype": dtype,
        "batch size": "1",
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
    }


def conditions(device: str, dtype: str, threads: int) -> str:
    """Batch size, dtype and machine, as a sentence names them."""
    machine = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{cpu_model()}, {in_threads(threads)}"
    )
    return f"batch size 1, {dtype}, {machine}"


def in_threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def command() -> str:
    """How this process was started."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    start = (
        f"python -m {module.name}"
        if module and module.name != "__main__"
        else Path(sys.argv[0]).name
    )
    return " ".join([start.removesuffix(".__main__"), *map(shlex.quote, sys.argv[1:])])


def code(root: Path = ROOT) -> str:
    """The commit of the source tree at `root`, with a note where files of it were changed; of an
    installed package its version.
    """
    if (root / ".git").exists():
        git = partial(
            subprocess.check_output, cwd=root, text=True, timeout=10, stderr=subprocess.DEVNULL
        )
        with suppress(OSError, subprocess.SubprocessError):
            commit = git(["git", "rev-parse", "--short=12", "HEAD"]).strip()
            return (
                "commit"
                f" {commit}{', with changes' * bool(git(['git', 'status', '--porcelain', '--untracked-files=no']))}"
            )
    return f"version {installed('nde-talf')}"


def cpu_model() -> str:
    """The CPU's model name, or the architecture where the system gives none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
