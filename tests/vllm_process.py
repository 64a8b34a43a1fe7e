"""A script that uses vLLM, in a process of its own that always ends."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SECONDS = 420
"""That a process may take: it takes less than 60 on two quiet cores."""


def in_process(script: str, arguments: Any, folder: Path, seconds: float = SECONDS) -> Any:
    """What `script` writes to the file `sys.argv[2]` as JSON, given `arguments` as JSON in the file
    `sys.argv[1]`.

    After `seconds` the script and all processes that it started are ended, and the test fails with
    what they wrote. They write to a file: with a pipe, one process that is left over would keep the
    test waiting for ever.
    """
    code, given, result, log = (
        folder / name for name in ("script.py", "in.json", "out.json", "log.txt")
    )
    code.write_text(script)
    given.write_text(json.dumps(arguments))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, code, given, result],
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = log.read_text()[-6000:]
    if status is None:
        load, cores = os.getloadavg()[0], os.cpu_count()
        pytest.fail(
            f"The script had not ended after {seconds} s, at a load of {load:.0f} on {cores} cores."
            f" It wrote:\n{said}"
        )
    assert status == 0, f"The script ended with status {status}:\n{said}"
    return json.loads(result.read_text())
