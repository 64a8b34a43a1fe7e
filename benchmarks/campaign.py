"""Everything that goes wrong, on purpose, and what comes of it.

`python -m benchmarks.campaign [--short] [--folder FOLDER]`: bad command lines, damaged exports,
flipped bits, checkpoints of other runs, kills and signals in every stage, a full disk and short
memory in every stage, two processes on one run. Ray workers are killed by `python -m
benchmarks.kills --workers 2`. It makes a small run in FOLDER first. Every case is noted in
FOLDER/cases.jsonl as it ends, so that a campaign that was stopped goes on where it was. Most cases
run in processes forked from this one, which has imported everything; some of the command lines run
as a user starts them. `--short` takes a few cases of each part, always the same ones: about three
minutes. Exits with status 1 if a case ended in a traceback, in a wrong result that nobody was told
of, or in a way that has no explanation.
"""

import argparse
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from pyarrow.parquet import read_table

import nde_talf.pipelines.generate
import nde_talf.pipelines.run
from benchmarks import bad_inputs
from benchmarks.damage import Artefact, artefacts, damages, digest, flip, loaded, prepare
from benchmarks.forked import TOLD, TRACEBACK, Outcome, forked
from benchmarks.outcomes import EQUAL, ROUNDED, SILENT, write
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checkpoint import CHECKPOINT
from nde_talf.decoding.common.files import checksum
from nde_talf.evaluation.benchmark import read_records
from nde_talf.pipelines.config import STAGES
from nde_talf.pipelines.lock import LOCK
from nde_talf.pipelines.signals import leave_at_once
from nde_talf.selector.latency import LatencyTable
from tests.pipelines import micro

FOLDERS = {name: "report" if name == "evaluate" else name for name in STAGES}
"""The folder of a run for each stage, in order."""
SHORT = ("traces", "draft")
"""The stages that a short campaign disturbs."""
SECONDS = 600
"""After which a case counts as one that hangs."""
SECONDS_SHORT = 120
"""The same, of a stage that is short of memory."""
THREAD_START = re.compile(r'threading\.py", line \d+ in start\b')
"""In a dump of stacks: a thread waits for one that it started.

In CPython (its issue 140746) it does so for ever where the new thread runs out of memory before it
has said that it runs. No program can end that wait but by a signal.
"""
NATIVE = re.compile(
    r"cannot allocate memory for thread-local data: ABORT|terminate called after .*bad_alloc",
    re.DOTALL,
)
"""What the C library and C++ say before they end a process whose allocation failed."""
SPARE = {"disk": (0, 20_000), "memory": (4 << 20, 20 << 20, 80 << 20)}
"""Bytes that a stage has left: of disk, of memory beyond what the imports take."""


@dataclass
class Campaign:
    """folder: of the runs and of what is known so far. short: a few cases of each part."""

    folder: Path
    short: bool
    cases: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.notes, self.scratch = (
            self.folder / "cases.jsonl",
            self.folder / f"scratch/{os.getpid()}",
        )
        self.scratch.mkdir(parents=True, exist_ok=True)
        if self.notes.exists():
            noted = [json.loads(line) for line in self.notes.read_text().splitlines()]
            self.cases = list({tuple(case[:2]): case for case in noted}.values())
        self._known = {tuple(case[:2]) for case in self.cases}

    def case(self, part: str, name: str, run: Callable[[], Outcome]) -> None:
        """Run one case and note part, name, outcome and message, unless that is done."""
        if (part, name) in self._known:
            return
        found = run()
        text = " ".join(found.text.split())
        for path, word in (
            (self.folder, "FOLDER"),
            (sys.prefix, "ENVIRONMENT"),
            (micro.ROOT, "PROJECT"),
        ):
            text = text.replace(str(path), word)
        self.cases.append([part, name, found.what, text[-400:]])
        with self.notes.open("a") as stream:
            stream.write(json.dumps(self.cases[-1]) + "\n")
        print(f"{part}: {name}: {found.what}", file=sys.stderr, flush=True)

    def some(self, count: int) -> int:
        """How many cases of so many are run: all, or a few."""
        return min(count, 2) if self.short else count

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that are disturbed."""
        return SHORT if self.short else tuple(FOLDERS)

    def words(self, run: str, *more: str) -> list[str]:
        """The arguments of a command that works on `run`."""
        return micro.command(self.folder, "tracking=disabled", f"run={run}", *more)[3:]

    def run(self, run: str) -> Path:
        return self.folder / "checkpoints" / run

    def command(
        self,
        words: list[str],
        main=nde_talf.pipelines.run.main,
        seconds: float = SECONDS,
        **options,
    ) -> Outcome:
        """A command line in a forked process."""

        def started() -> None:
            os.environ |= micro.environment()
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # a shell may have had it ignored
            leave_at_once()
            sys.argv = [main.__module__, *words]
            main()
            sys.exit(0)

        return forked(started, self.scratch / "out", seconds, **options)

    def begun(self, run: str, stage: str) -> Path:
        """A new run that has all stages before `stage`. Returns its folder."""
        folder = self.run(run)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in list(FOLDERS)[: list(FOLDERS).index(stage)]:
            shutil.copytree(self.run("base") / FOLDERS[name], folder / FOLDERS[name])
        return folder


def made(stage: str, run: Path) -> str:
    """What a stage made, but for times: a hash that two runs of the same settings have in common."""
    if stage == "traces":
        return digest(TraceStore(run / stage).shards)
    if stage == "latency":
        table = LatencyTable.load(run / stage / "table.json")
        return digest([table.contexts, table.nodes, table.widths, table.models])
    if stage == "evaluate":  # which trees are the fastest depends on times
        blocks = Counter(
            (record.setting, *record.block) for record in read_records(run / "report/records.jsonl")
        )
        return digest(sorted(blocks))
    weights = [
        path
        for path in sorted((run / stage).rglob("*.safetensors"))
        if "training" not in path.parts
    ]
    return digest([[str(path.relative_to(run)), checksum(path)] for path in weights])


def goes_on(campaign: Campaign, stage: str, run: str, smaller_batches: bool = False) -> Outcome:
    """Run a stage to its end after what happened to it, and compare with the undisturbed run.
    smaller_batches: it reported that it made some of its work in smaller batches, whose sums round
    in another order.
    """
    ended = campaign.command(campaign.words(run, f"stage={stage}"))
    if ended.what != "ended well":
        return Outcome(
            TRACEBACK if ended.what == TRACEBACK else f"cannot go on: {ended.what}", ended.text
        )
    if made(stage, campaign.run(run)) == made(stage, campaign.run("base")):
        return Outcome(EQUAL, ended.text)
    rounded = (
        smaller_batches
        and stage == "traces"
        and close(_table(campaign.run(run)), _table(campaign.run("base")))
    )
    return Outcome(ROUNDED if rounded else SILENT, ended.text)


def _table(run: Path) -> list[list]:
    return [
        list(row.values())
        for file in sorted((run / "traces").glob("*.parquet"))
        for row in read_table(file).to_pylist()
    ]


def close(one, other) -> bool:
    """Whether two nested lists agree in all but the last digits of their numbers (1e-5 of the
    number).
    """
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
    return one == other


def bad_command_lines(campaign: Campaign) -> None:
    """Command lines with one thing wrong. Every thirtieth runs as a user starts it."""
    files, runs = campaign.folder / "files", campaign.folder / "runs"
    bad_inputs.write_files(files)
    if not (runs / "default").exists():
        shutil.copytree(campaign.run("base"), runs / "default")
    for number, (wanted, command, *arguments) in list(enumerate(bad_inputs.BAD))[
        :: 15 if campaign.short else 1
    ]:
        given = [
            shlex.split(each.replace("FILES", str(files)).replace("RUNS", str(runs)))[0]
            for each in arguments
        ]
        given = (
            campaign.words("chats", *given)
            if "base=default" in given and "run=chats" in given
            else given
        )
        given += (
            []
            if any("paths.checkpoints=" in each for each in given[-2:])
            else [f"paths.checkpoints={runs}"]
        )

        def run(number=number, wanted=wanted, command=command, given=given) -> Outcome:
            module = {"run": nde_talf.pipelines.run, "generate": nde_talf.pipelines.generate}[
                command
            ]
            if number % 30 == 0:
                done = micro.process([sys.executable, "-m", module.__name__, *given])
                words = " ".join((done.stdout + done.stderr).replace("│", " ").split())
                found = Outcome(
                    (
                        TRACEBACK
                        if "Traceback" in words
                        else TOLD
                        if done.returncode == 1
                        else "ended well"
                    ),
                    words,
                )
            else:
                found = campaign.command(given, module.main, seconds=90)
            for left in set(runs.iterdir()) - {runs / "default"}:
                shutil.rmtree(left)
            if found.what in ("ended well", "hangs"):
                return Outcome("taken as it stands", found.text)
            told = found.what != TOLD or wanted.replace(" ", "") in found.text.replace(" ", "")
            return found if told else Outcome("told in other words", found.text)

        campaign.case("bad command lines", f"{number}: {command} {' '.join(arguments)}", run)


def damaged_exports(campaign: Campaign) -> None:
    """Exports with one file damaged, and single bits flipped in them."""
    run, other = campaign.run("damaged"), campaign.run("other")
    if not run.exists():
        shutil.copytree(campaign.run("base"), run)
        prepare(run)
    for artefact in artefacts():
        right = forked(
            lambda a=artefact: digest(a.load(run / a.path)), campaign.scratch / "out", SECONDS
        ).value
        assert right, f"{artefact.name}: an undamaged one is not loaded"
        rng = random.Random(artefact.name)
        every = list(damages(run, other, artefact, rng))
        for what, change in rng.sample(every, campaign.some(min(len(every), 16))):
            campaign.case(
                "damaged exports",
                f"{artefact.name}: {what}",
                lambda a=artefact, change=change, right=right: loaded(
                    run, a, change, campaign.scratch, right
                ),
            )
        for what, change in _flips(run, artefact, rng, campaign.some(38)):
            campaign.case(
                "flipped bits",
                f"{artefact.name}: {what}",
                lambda a=artefact, change=change, right=right: loaded(
                    run, a, change, campaign.scratch, right
                ),
            )


def foreign_checkpoints(campaign: Campaign) -> None:
    """The checkpoints of another run, put into unfinished trainings whose weights have the same
    names and shapes.
    """
    other = campaign.run("other")
    for path in sorted(other.rglob(CHECKPOINT))[: campaign.some(100)]:
        name = path.relative_to(other)
        stage = next(stage for stage, folder in FOLDERS.items() if folder == name.parts[0])

        def run(path=path, name=name, stage=stage) -> Outcome:
            put = campaign.begun("foreign", stage) / name
            put.parent.mkdir(parents=True)
            shutil.copy(path, put)
            found = campaign.command(campaign.words("foreign", f"stage={stage}"))
            return Outcome(SILENT, found.text) if found.what == "ended well" else found

        campaign.case("damaged exports", f"training of {stage}: {name} is another run's", run)


def _flips(
    run: Path, artefact: Artefact, rng: random.Random, count: int
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    source = run / artefact.path
    files = (
        [source]
        if source.is_file()
        else [f for f in sorted(source.rglob("*")) if f.name.endswith(artefact.files)]
    )
    if artefact.name in (
        "published head",
        "records",
    ):  # of others, and of a stage that is not finished: without checksums
        return
    for _ in range(count):
        file = rng.choice(files)
        at, bit, name = (
            rng.randrange(file.stat().st_size),
            rng.randrange(8),
            file.relative_to(source),
        )
        yield (
            f"{file.name}, byte {at}, bit {bit}",
            lambda path, name=name, at=at, bit=bit: flip(path / name, at, bit),
        )


def interrupted(campaign: Campaign) -> None:
    """Kills (SIGKILL) and signals (SIGINT, SIGTERM) at random moments of every stage; after the
    last the stage goes on to its end.
    """
    for stage in campaign.stages:
        for what, numbers in (
            ("killed", [signal.SIGKILL] * campaign.some(10)),
            (
                "signals",
                [signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT][
                    : campaign.some(5)
                ],
            ),
        ):
            if (what, f"{stage}: at the end") in campaign._known:
                continue
            campaign.begun(what, stage)
            _interrupted(campaign, stage, what, numbers)
            campaign.case(
                what,
                f"{stage}: at the end",
                lambda stage=stage, what=what: goes_on(campaign, stage, what),
            )


def _interrupted(campaign: Campaign, stage: str, what: str, numbers: list[signal.Signals]) -> None:
    manifest = campaign.run("base") / FOLDERS[stage] / "manifest.json"
    seconds, rng = json.loads(manifest.read_text())["seconds"], random.Random(f"{stage} {what}")
    for turn, number in enumerate(numbers):
        moment = rng.uniform(0, max(2.0, 2 * seconds / len(numbers)))

        def disturb(process, number=number, moment=moment) -> None:
            process.join(moment)
            if process.exitcode is None:
                os.kill(process.pid, number)

        def run(disturb=disturb, number=number) -> Outcome:
            found = campaign.command(campaign.words(what, f"stage={stage}"), started=disturb)
            if found.what == f"ended by signal {number}":
                return Outcome("ended by the signal", found.text)
            words = {"ended well": "had ended before"}
            return Outcome(words.get(found.what, found.what), found.text)

        campaign.case(what, f"{stage}: {number.name} {turn + 1}, after {moment:.1f} s", run)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """`folder` on a file system of its own with so many bytes; gives a function that changes that.

    Needs root.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield lambda size: subprocess.run(
            ["mount", "-o", f"remount,size={size}", folder], check=True
        )
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def full_disk(campaign: Campaign) -> None:
    """A file system that is full in the middle of every stage; with space again, the stage goes on."""
    if os.geteuid():
        return print(
            "full disk: not run, as mounting a small file system needs root", file=sys.stderr
        )
    for stage in campaign.stages:
        for spare in SPARE["disk"][: campaign.some(2)]:
            name = f"{stage}: {spare} bytes left"
            if ("full disk", name) not in campaign._known:
                with small_disk(campaign.run("full"), 1 << 30) as resize:
                    _full(campaign, stage, spare, name, resize)


def _full(
    campaign: Campaign, stage: str, spare: int, name: str, resize: Callable[[int], None]
) -> None:
    folder = campaign.run("full")
    for before in list(FOLDERS)[: list(FOLDERS).index(stage)]:
        shutil.copytree(campaign.run("base") / before, folder / before)
    state = os.statvfs(folder)
    resize((state.f_blocks - state.f_bfree) * state.f_frsize + max(spare, state.f_frsize))

    def run() -> Outcome:
        found = campaign.command(campaign.words("full", f"stage={stage}"))
        if found.what == "ended well":
            return Outcome("it was enough", found.text)
        wrong = found.what == TOLD and "disk" not in found.text.replace(str(folder), "")
        return Outcome("told, without the word", found.text) if wrong else found

    campaign.case("full disk", name, run)
    resize(1 << 30)
    campaign.case("full disk", f"{name}, then space", lambda: goes_on(campaign, stage, "full"))


def short_memory(campaign: Campaign) -> None:
    """Every stage with too little memory, then with enough."""
    for stage in campaign.stages:
        campaign.begun("short", stage)
        halved: list[str] = []  # what was reported of smaller batches
        for spare in SPARE["memory"][: campaign.some(3)]:

            def run(stage=stage, spare=spare, halved=halved) -> Outcome:
                words = campaign.words("short", f"stage={stage}")
                found = campaign.command(words, seconds=SECONDS_SHORT, headroom=spare)
                halved += re.findall(r"traces.micro_batch is now \d+", found.text)
                if found.what == "ended well":
                    return Outcome("it was enough", found.text)
                if found.what == "hangs" and THREAD_START.search(found.text):
                    return Outcome("waits for a thread", found.text)
                if NATIVE.search(found.text[-400:]) or found.what in (
                    "ended by signal 6",
                    "ended by signal 11",
                ):
                    return Outcome("killed for want of memory", found.text)
                wrong = found.what == TOLD and "memory" not in found.text
                return Outcome("told, without the word", found.text) if wrong else found

            campaign.case("short memory", f"{stage}: {spare >> 20} MiB", run)

        def then(stage=stage, halved=halved) -> Outcome:
            return goes_on(campaign, stage, "short", smaller_batches=bool(halved))

        campaign.case("short memory", f"{stage}: then enough", then)


def two_processes(campaign: Campaign) -> None:
    """A second process on a run that another one works on; then the first one's result."""
    for stage in ("traces",) if campaign.short else ("traces", "pair", "evaluate"):
        campaign.begun("shared", stage)
        words = campaign.words("shared", f"stage={stage}")

        def run(words=words) -> Outcome:
            first = subprocess.Popen([sys.executable, "-m", "pipelines.run", *words], cwd=micro.ROOT, env=micro.environment(),
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
            while first.poll() is None and not (campaign.run("shared") / LOCK).exists():
                time.sleep(0.05)
            second = campaign.command(words)
            first.wait()
            return second

        campaign.case("two processes", f"{stage}: the second", run)
        campaign.case(
            "two processes",
            f"{stage}: the first",
            lambda stage=stage: goes_on(campaign, stage, "shared"),
        )


PARTS = (
    short_memory,  # first, while this process holds no memory that its forks could use again
    bad_command_lines,
    damaged_exports,
    foreign_checkpoints,
    interrupted,
    full_disk,
    two_processes,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few cases of each part")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("checkpoints/campaign"),
        help="for runs, and to go on from",
    )
    parser.add_argument(
        "--only", nargs="*", default=[part.__name__ for part in PARTS], help="names of parts"
    )
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    campaign = Campaign(options.folder.resolve(), options.short)
    for run, more in (("base", ()), ("other", ("seed=1",)))[: 1 if options.short else 2]:
        if not (campaign.run(run) / "report/manifest.json").exists():
            ended = campaign.command(campaign.words(run, *more))
            assert ended.what == "ended well", ended.text
    for part in PARTS:
        if part.__name__ in options.only:
            part(campaign)
    write(campaign.cases, campaign.short)


if __name__ == "__main__":
    main()
