"""Kill stage traces with SIGKILL at ten random moments, resume each time, and compare with an
undisturbed run.

`python -m benchmarks.kills`: trains its own small pair in a temporary folder (about three minutes
in all). With `--workers 2` (Ray) one run goes on while its workers are killed, at ten random
moments, and is not resumed.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import report
from nde_talf.data.traces.store import TraceStore

SIZES = [
    "model=tiny_ci",
    "model.target_lm.steps=40",
    "model.draft_lm.steps=40",
    "tracking=disabled",
    "model.threads=1",  # sums of several threads round in another way; a Ray worker has one
    (
        "traces={train_prompts: 30, validation_prompts: 10, shard_prompts: 1, samples: 4,"
        " new_tokens: 64}"
    ),
    "evaluation.prompts=4",
]


def command(folder: Path, run: str, stage: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pipelines.run",
        *SIZES,
        f"paths.checkpoints={folder}",
        f"run={run}",
        f"stage={stage}",
    ]


def shards(folder: Path) -> dict:
    return TraceStore(folder / "traces").shards


def resumed(folder: Path, kills: int, rng: random.Random) -> list[list]:
    """Kill the command and start it again, so many times: a row for each."""
    rows = []
    for kill in range(kills):
        before = len(shards(folder / "killed"))
        process = subprocess.Popen(command(folder, "killed", "traces"), stdout=subprocess.DEVNULL)
        while len(shards(folder / "killed")) == before and process.poll() is None:
            time.sleep(0.01)  # it has started and made one more
        moment = rng.uniform(0, 1.5)
        time.sleep(moment)
        running = process.poll() is None
        process.kill()
        process.wait()
        rows.append(
            [
                kill + 1,
                f"{moment:.2f} s",
                before,
                len(shards(folder / "killed")),
                "yes" if running else "finished",
            ]
        )
    subprocess.run(command(folder, "killed", "traces"), check=True, stdout=subprocess.DEVNULL)
    return rows


def workers_killed(folder: Path, kills: int, rng: random.Random, workers: int) -> list[list]:
    """Kill Ray workers of one run, so many times: a row for each."""
    import psutil

    started = [*command(folder, "killed", "traces"), f"engine.workers={workers}"]
    printed, rows, last = folder / "printed", [], 0
    with printed.open("wb") as log:
        process = subprocess.Popen(started, stdout=log, stderr=log)
    while len(rows) < kills and process.poll() is None:
        if (
            len(shards(folder / "killed")) == last
        ):  # a worker's death over one unit again and again would end the run
            time.sleep(0.1)
            continue
        moment = rng.uniform(0, 3)
        time.sleep(moment)
        own = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "Actor" in " ".join(child.cmdline())
        ]
        if own:
            before, victim = len(shards(folder / "killed")), rng.choice(own)
            last = before
            victim.kill()
            rows.append(
                [
                    len(rows) + 1,
                    f"{moment:.2f} s",
                    before,
                    len(shards(folder / "killed")),
                    f"worker {victim.pid}",
                ]
            )
    if process.wait():
        sys.exit(
            f"the run did not survive the deaths of its workers:\n{printed.read_text()[-2000:]}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--workers", type=int, default=1, help="above 1: kill Ray workers instead of the command"
    )
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stage in ("pair", "traces"):
            subprocess.run(command(folder, "whole", stage), check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(folder / "whole/pair", folder / "killed/pair")
        if options.workers > 1:
            rows = workers_killed(folder, options.kills, rng, options.workers)
        else:
            rows = resumed(folder, options.kills, rng)
        same = shards(folder / "killed") == shards(folder / "whole")
        total = len(shards(folder / "whole"))
        rows.append(
            [
                "–",
                "not killed",
                rows[-1][3],
                total,
                f"all {total} equal to the undisturbed run's: {same}",
            ]
        )
    columns = [
        "kill",
        "after the first shard it made",
        "shards before",
        "shards after",
        "was running",
    ]
    if options.workers > 1:
        columns = ["kill", "after a further shard", "shards before", "shards after", "killed"]
    name = "kills" if options.workers == 1 else "kills_of_workers"
    report(
        name,
        "python -m benchmarks.kills"
        + (f" --workers {options.workers}" if options.workers > 1 else ""),
        columns,
        rows,
    )
    if not same:
        sys.exit("the resumed run differs from the undisturbed one")


if __name__ == "__main__":
    main()
