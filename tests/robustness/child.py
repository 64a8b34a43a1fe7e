"""A case in a process of its own, with limits of time and memory, and how it ended."""

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nde_talf import UserError

WORKS, TOLD, FAILURE = "works", "told", "failure"
REFUSED = 1, 2
"""Statuses of a command that says in words what is wrong."""


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        kind: it works; it is told in words what is wrong; or it fails: a traceback, a signal, no
            end.
        text: what was printed or told.
        value: what the case returned.
    """

    kind: str
    text: str = ""
    value: Any = None


@dataclass(frozen=True)
class Limits:
    """Limits of a case.

    Attributes:
        seconds: after which it is killed.
        memory: bytes that it may allocate beyond what this process has.
        largest_file: bytes that it may write to one file.
        encoding: of its output.
    """

    seconds: float = 300
    memory: int | None = None
    largest_file: int | None = None
    encoding: str = "utf-8"


def run(work: Callable[[], Any], folder: Path, limits: Limits = Limits()) -> Outcome:
    """Call `work` in a forked process, which has imported everything already.

    folder: where its output goes.
    """
    printed, answer = folder / "printed", folder / "answer.json"
    answer.unlink(missing_ok=True)
    process = get_context("fork").Process(target=_child, args=(work, printed, answer, limits))
    process.start()
    process.join(limits.seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome(
            FAILURE,
            f"no end after {limits.seconds} s: {printed.read_text(errors='replace')[-2000:]}",
        )
    text = " ".join(printed.read_text(limits.encoding, "replace").replace("│", " ").split())
    if answer.exists():
        return Outcome(text=text, **json.loads(answer.read_text()))
    return Outcome(FAILURE, f"status {process.exitcode}: {text[-2000:]}")


def _child(work: Callable[[], Any], printed: Path, answer: Path, limits: Limits) -> None:
    sink = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(sink, number)
    sys.stdout, sys.stderr = (os.fdopen(at, "w", encoding=limits.encoding) for at in (1, 2))
    if limits.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if limits.largest_file is not None:
        size = resource.RLIMIT_FSIZE
        resource.setrlimit(size, (limits.largest_file, resource.getrlimit(size)[1]))
    kind, value = FAILURE, None
    try:
        value = work()
        kind = WORKS
    except UserError as error:
        print(error)
        kind = TOLD
    except SystemExit as error:
        if error.code in (None, 0, *REFUSED):
            kind = TOLD if error.code else WORKS
        else:
            print(f"status {error.code}")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    answer.write_text(json.dumps({"kind": kind, "value": value}))
    os._exit(0)
