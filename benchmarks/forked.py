"""Cases in processes of their own, forked from one that has imported everything: what a case
printed, and how it ended.
"""

import faulthandler
import json
import multiprocessing
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.errors import UserError

TOLD, TRACEBACK = "told in words", "traceback"


@dataclass
class Outcome:
    """what: in a word or two. text: what was printed. value: what the case returned, if it did."""

    what: str
    text: str = ""
    value: Any = None


def forked(
    work: Callable[[], Any],
    out: Path,
    seconds: float,
    headroom: int | None = None,
    started: Callable[[multiprocessing.Process], object] | None = None,
) -> Outcome:
    """Call `work` in a forked process.

    Args:
        out: file for what it prints.
        seconds: after which it is killed.
        headroom: bytes that it may allocate beyond what this process has.
        started: called with the process once it runs, instead of waiting for `seconds`.
    """
    answer = out.with_suffix(".json")
    answer.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(work, out, answer, headroom, seconds)
    )
    process.start()
    if started:
        started(process)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome("hangs", out.read_text(errors="replace")[-4000:])
    text = out.read_text(errors="replace")
    found = json.loads(answer.read_text()) if answer.exists() else {}
    if "value" in found:
        return Outcome("returned", text, found["value"])
    if "told" in found:
        return Outcome(TOLD, found["told"])
    code, words = process.exitcode, " ".join(re.sub("[│╭╮╰╯─]+", " ", text).split())
    if "Traceback (most recent call last)" in text or code not in (0, 1, 130, 143):
        return Outcome(TRACEBACK if code >= 0 else f"ended by signal {-code}", text)
    return Outcome({0: "ended well", 1: TOLD, 130: "interrupted", 143: "interrupted"}[code], words)


def _child(
    work: Callable[[], Any], out: Path, answer: Path, headroom: int | None, seconds: float
) -> None:
    sink = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(sink, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    faulthandler.dump_traceback_later(0.9 * seconds)  # says where it hangs
    if headroom is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + headroom
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    code = 0
    try:
        answer.write_text(json.dumps({"value": work()}))
    except UserError as error:
        answer.write_text(json.dumps({"told": str(error)}))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
