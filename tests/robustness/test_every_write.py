"""Every write, fsync, rename and removal of a run fails once, or is the last before a kill.

A full and a broken disk end in a sentence. The next command goes on, and ends with the same bytes.
"""

import errno
import io
import os
from itertools import count
from pathlib import Path

import pytest

from nde_talf.pipelines.config.command_line import answer
from tests.pipelines.chain import Chain
from tests.robustness import child

pytestmark = pytest.mark.nightly
CALLS = ("fsync", "replace", "rename", "mkdir", "chmod", "unlink", "rmdir")
KILLED = 9
LIMITS = child.Limits(60)


class Faults:
    """Counts what changes the disk, and lets call number `when` fail with `number`, or 0: kill."""

    def __init__(self, when, number):
        self.left, self.number, self.open = when, number, io.open
        for name in CALLS:
            setattr(os, name, self.failing(getattr(os, name)))
        io.open = self.opened

    def failing(self, call):
        def called(*values, **named):
            self.step(values[0])
            return call(*values, **named)

        return called

    def step(self, path):
        self.left -= 1
        if self.left < 0 and not self.number:
            os._exit(KILLED)
        if self.left == -1:
            raise OSError(self.number, os.strerror(self.number), *[path] * isinstance(path, Path))

    def opened(self, path, mode="r", *values, **named):
        stream = self.open(path, mode, *values, **named)
        if mode != "r" and isinstance(path, (str, Path)):
            whole = stream.write

            def write(text):
                if not self.left:
                    whole(text[: len(text) // 2])
                    stream.flush()
                self.step(Path(path))
                return whole(text)

            stream.write = write
        return stream


def work(folder, force, when, number):
    """Run all stages, the first by force, under a fault; return the calls that it would leave."""
    chain, faults = Chain(folder, text="again"), Faults(when, number)
    try:
        chain.run("pair", force)
        chain.run()
    except Exception as error:
        answer(error)
    left, faults.left = faults.left, 1 << 30  # none from here on
    return left


@pytest.mark.parametrize("force", [False, True], ids=["new", "forced"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, 0], ids=["full", "broken", "killed"])
def test_a_fault_at_any_moment_is_told_and_gone_on_from(tmp_path, force, number):
    results = []
    for text in ("again", *["before"] * force):
        whole = Chain(tmp_path / f"whole-{text}", text=text)
        whole.run()
        results.append(whole.made())
    for when in count():
        folder = tmp_path / str(when)
        if force:
            Chain(folder, text="before").run()
        outcome = child.run(lambda f=folder, n=when: work(f, force, n, number), tmp_path, LIMITS)
        if outcome.kind == child.WORKS and outcome.value >= 0:
            break  # fewer calls than `when`
        if number:  # a folder that is there already need not be made
            assert outcome.kind in (child.TOLD, child.WORKS), (when, outcome)
        else:
            assert outcome.text.startswith(f"status {KILLED}"), (when, outcome)
        again = Chain(folder, text="again")
        again.run()
        assert again.made() in results, when
        assert {path.name for path in folder.rglob(".*")} == {".lock"}, when
    assert when > 40
