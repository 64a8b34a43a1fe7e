"""Kill stage traces with SIGKILL at ten random moments, resume each time, and compare with an undisturbed run.

`python -m benchmarks.kills`: trains its own small pair in a temporary folder (about three minutes in all).
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import report

SIZES = [
    "model=tiny_ci",
    "model.target_lm.steps=40",
    "model.draft_lm.steps=40",
    "tracking=disabled",
    "traces={train_prompts: 30, validation_prompts: 10, shard_prompts: 1, samples: 4, new_tokens: 64}",
    "evaluation.prompts=4",
]


def command(folder: Path, run: str, stage: str) -> list[str]:
    return [sys.executable, "-m", "pipelines.run", *SIZES, f"paths.checkpoints={folder}", f"run={run}", f"stage={stage}"]


def shards(folder: Path) -> dict:
    index = folder / "traces/shards.json"
    return json.loads(index.read_text())["shards"] if index.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    rows, rng = [], random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stage in ("pair", "traces"):
            subprocess.run(command(folder, "whole", stage), check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(folder / "whole/pair", folder / "killed/pair")
        for kill in range(options.kills):
            before = len(shards(folder / "killed"))
            process = subprocess.Popen(command(folder, "killed", "traces"), stdout=subprocess.DEVNULL)
            while len(shards(folder / "killed")) == before and process.poll() is None:
                time.sleep(0.01)  # it has started and made one more
            moment = rng.uniform(0, 1.5)
            time.sleep(moment)
            running = process.poll() is None
            process.kill()
            process.wait()
            rows.append([kill + 1, f"{moment:.2f} s", before, len(shards(folder / "killed")), "yes" if running else "finished"])
        subprocess.run(command(folder, "killed", "traces"), check=True, stdout=subprocess.DEVNULL)
        same = shards(folder / "killed") == shards(folder / "whole")
        total = len(shards(folder / "whole"))
        rows.append(["–", "not killed", rows[-1][3], total, f"all {total} equal to the undisturbed run's: {same}"])
    columns = ["kill", "after the first shard it made", "shards before", "shards after", "was running"]
    report("kills", "python -m benchmarks.kills", columns, rows)
    if not same:
        sys.exit("the resumed run differs from the undisturbed one")


if __name__ == "__main__":
    main()
