"""What a measurement was made with: date, command, code, machine and versions, as text."""

import platform
import shlex
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "numpy")


def environment(device: str, dtype: str, threads: int) -> dict[str, str]:
    """threads: of the CPU while timing."""
    return {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": command(),
        "code": code(),
        "device": f"{device}, {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else device,
        "CPU": f"{cpu_model()}, {in_threads(threads)} while timing",
        "dtype": dtype,
        "batch size": "1",
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
    }


def conditions(device: str, dtype: str, threads: int) -> str:
    """Batch size, dtype and machine, as a sentence names them."""
    machine = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{cpu_model()}, {in_threads(threads)}"
    return f"batch size 1, {dtype}, {machine}"


def in_threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def command() -> str:
    """How this process was started."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    start = f"python -m {module.name}" if module and module.name != "__main__" else Path(sys.argv[0]).name
    return " ".join([start.removesuffix(".__main__"), *map(shlex.quote, sys.argv[1:])])


def code(root: Path = ROOT) -> str:
    """The commit of the source tree at `root`, with a note where files of it were changed; of an installed package its
    version."""
    if (root / ".git").exists():
        try:
            commit, changed = (
                subprocess.run(["git", "-C", str(root), *asked], capture_output=True, text=True, timeout=10, check=True).stdout
                for asked in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
            )
            return f"commit {commit.strip()}{', with changes' if changed.strip() else ''}"
        except (OSError, subprocess.SubprocessError):
            pass
    return f"version {installed('nde-talf')}"


def cpu_model() -> str:
    """The CPU's model name, or the architecture where the system gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
