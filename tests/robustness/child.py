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

from nde_talf.decoding.common.errors import UserError

WORKS, TOLD, FAILURE = "works", "told", "failure"
REFUSED = 1
"""Status of a command that says in words what is wrong."""


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


def run(
    work: Callable[[], Any], folder: Path, seconds: float = 300, memory: int | None = None
) -> Outcome:
    """Call `work` in a forked process, which has imported everything already.

    Args:
        folder: where its output goes.
        seconds: after which it is killed.
        memory: bytes that it may allocate beyond what this process has.
    """
    printed, answer = folder / "printed", folder / "answer.json"
    answer.unlink(missing_ok=True)
    process = get_context("fork").Process(target=_child, args=(work, printed, answer, memory))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome(FAILURE, f"no end after {seconds} s: {printed.read_text()[-2000:]}")
    text = " ".join(printed.read_text(errors="replace").replace("│", " ").split())
    if answer.exists():
        return Outcome(text=text, **json.loads(answer.read_text()))
    return Outcome(FAILURE, f"status {process.exitcode}: {text[-2000:]}")


def _child(work: Callable[[], Any], printed: Path, answer: Path, memory: int | None) -> None:
    sink = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(sink, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    if memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer.write_text(json.dumps({"kind": WORKS, "value": work()}))
    except UserError as error:
        print(error)
        answer.write_text(json.dumps({"kind": TOLD}))
    except SystemExit as error:
        if error.code in (None, 0, REFUSED):
            answer.write_text(json.dumps({"kind": TOLD if error.code else WORKS}))
        else:
            print(f"status {error.code}")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
