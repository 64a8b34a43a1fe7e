"""Command lines in processes of their own, forked from one that has imported what they import: that
alone takes ten seconds.

Otherwise as `python -m module` would start them: `module` runs as __main__, and nothing is set up
but imports.
"""

import atexit
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tests.pipelines.micro import ROOT, command, environment

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.pipelines.preloaded"])


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    """A micro run, or a part of it: what micro.run gives."""
    return finish("nde_talf.pipelines.run", command(folder, *overrides)[3:])


def said(done: subprocess.CompletedProcess) -> str:
    """Output as one line, without the box that errors are drawn in."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", done.stdout + done.stderr)


def printed_by(folder: Path, *overrides: str) -> str:
    """What a micro run says that succeeds."""
    done = run(folder, *overrides)
    assert done.returncode == 0, said(done)
    return said(done)


def start(
    module: str, arguments: list[str], printed: str = os.devnull, errors: str = os.devnull
) -> BaseProcess:
    """Start `python -m module arguments`; what it prints goes into files."""
    process = context.Process(target=_main, args=(module, arguments, printed, errors))
    process.start()
    return process


def finish(module: str, arguments: list[str], seconds: float = 600) -> subprocess.CompletedProcess:
    """The same, and wait: what subprocess.run would give."""
    with TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(module, arguments, *map(str, files))
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired([module, *arguments], seconds)
        return subprocess.CompletedProcess(
            [module, *arguments], process.exitcode, *(file.read_text() for file in files)
        )


def _main(module: str, arguments: list[str], printed: str, errors: str) -> None:
    for number, path in ((1, printed), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment())
    os.chdir(ROOT)
    np.random.seed()  # otherwise the same in all that are forked
    # what the server registered is its own: among it the removal of a folder that all use
    atexit._clear()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
