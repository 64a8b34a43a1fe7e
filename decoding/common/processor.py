"""The name of the processor."""

import platform
from contextlib import suppress
from pathlib import Path


def cpu_model() -> str:
    """Return the CPU's model name, or the architecture where the system gives none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
