"""Peak memory of stage selector on synthetic roots of the NDE paper's number and size.

`python -m benchmarks.selector_memory [--scale 0.25]`. At scale 1: 1,750 training prompts under 8
sampling settings with 32 roots each (448,000 roots), 64,000 held-out ones, the hidden sizes of
Qwen-2.5 32B and 0.5B, 4 super-trees a root. The store is written to --folder, 20 GB with the labels
of six verifiers. A process of its own then does what stage selector does for one verifier: it
cross-fits, trains, and evaluates offline. Its training is short; memory does not depend on its
length.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import numpy as np
import torch

from benchmarks.timing import report
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.features import SCALARS
from nde_talf.selector.crossfit import train_selector
from nde_talf.selector.evaluate import evaluate_offline
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.roots import PricedRoots, roots_from_traces
from nde_talf.selector.rows import columns
from nde_talf.selector.settings import SelectorConfig

VERIFIERS = ["specinfer", "spectr", "khisti", "naivetree", "nss", "traversal"]
NAMES = ["t0.2", "t0.4", "t0.6", "t0.8", "t1.0", "t1.2", "p0.9", "p0.99"]
ROOTS, IN_SHARD = 32, 8  # of a prompt under a setting; prompts in a shard


def synthetic(
    folder: Path, train: int, held_out: int, hidden: tuple[int, int], verifiers: list[str]
) -> TraceStore:
    """A store of `train` and `held_out` prompts.

    Labels rise with depth, by more or less as the hidden states say.
    """
    store, rng, rows = TraceStore(folder), np.random.default_rng(0), IN_SHARD * ROOTS
    depth = torch.tensor([tree.depth for tree in TREES]) / 16
    groups = [
        (split, at, name)
        for split, n in (("train", train), ("validation", held_out))
        for at in range(0, n, IN_SHARD)
        for name in NAMES
    ]
    for shard, (split, at, name) in enumerate(groups):
        states = {
            key: torch.from_numpy(rng.standard_normal((rows, size), dtype=np.float32)).half()
            for key, size in zip(
                ("h_p_previous", "h_q_previous", "h_q_root"),
                (hidden[0], hidden[1], hidden[1]),
                strict=True,
            )
        }
        good = states["h_q_root"][:, 0].float().sigmoid()
        found = {
            "prompt_id": [f"{split}-{at + i // ROOTS}" for i in range(rows)],
            "kind": ["text"] * rows,
            "split": [split] * rows,
            "temperature": torch.full((rows,), SETTINGS[name].temperature),
            "top_p": torch.full((rows,), SETTINGS[name].top_p),
            "context": torch.arange(rows) % ROOTS * 16 + 64,
            **{key: torch.from_numpy(rng.random(rows, dtype=np.float32)) for key in SCALARS},
            **states,
        }
        for verifier in verifiers:
            noise = torch.from_numpy(rng.random((rows, 4, len(TREES)), dtype=np.float32))
            found[verifier] = 1 + 4 * good[:, None, None] * depth + noise
        store.write(store.name(shard, len(groups)), found)
    store.finish()
    return store


def select(folder: Path, verifier: str, folds: int) -> dict[str, float]:
    """Stage selector for one verifier, in this process: seconds, and bytes in memory at most."""
    anonymous, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            lines = Path("/proc/self/status").read_text().splitlines()
            anonymous.append(
                next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
            )

    threading.Thread(target=watch, daemon=True).start()
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.monotonic()
    store, run = TraceStore(folder / "traces"), folder / "run"
    table = LatencyTable([1, 600], [1, 41], [1, 4], [[1.0, 1.1]] * 2, [[0.05, 0.06]] * 2)
    read = [columns(store, split, run) for split in ("train", "validation")]
    splits = [roots_from_traces(small, [verifier], lambda _: None, large) for small, large in read]
    training, validation = (PricedRoots.of(roots, [verifier], [table]) for roots in splits)
    config = SelectorConfig(epochs=1, batch=1024, folds=folds)
    selector, _ = train_selector(training, validation, config, run / "training")
    figures = evaluate_offline(selector, training, validation, 0)
    ended.set()
    return {
        "training_roots": len(training),
        "seconds": time.monotonic() - started,
        "ratio": figures["all"]["selector"][0],
        "before": before,
        "anonymous": max(anonymous),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the paper's roots")
    parser.add_argument(
        "--hidden", type=int, nargs=2, default=[5120, 896], help="hidden sizes of target and draft"
    )
    parser.add_argument(
        "--verifiers", nargs="+", default=VERIFIERS, help="whose labels the store holds"
    )
    parser.add_argument("--folds", type=int, default=4, help="selector.folds")
    parser.add_argument(
        "--folder", type=Path, help="for the store and the run; default: a temporary folder"
    )
    parser.add_argument(
        "--select",
        action="store_true",
        help="only select from the store in --folder, and print JSON",
    )
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    if options.select:
        print(json.dumps(select(options.folder, options.verifiers[-1], options.folds)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, started = Path(name), time.monotonic()
        prompts = [-(-round(n * options.scale) // IN_SHARD) * IN_SHARD for n in (1750, 250)]
        synthetic(folder / "traces", *prompts, tuple(options.hidden), options.verifiers)
        made = time.monotonic() - started
        disk = sum(file.stat().st_size for file in (folder / "traces").iterdir())
        command = [
            sys.executable,
            "-m",
            "benchmarks.selector_memory",
            "--select",
            "--folder",
            name,
            "--folds",
            str(options.folds),
        ]
        command += ["--verifiers", *options.verifiers]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    per_root = 4 * (
        options.hidden[0] + 2 * options.hidden[1] + len(options.verifiers) * 4 * len(TREES)
    )
    names = [
        "training roots",
        "arrays in float32, GB",
        "store, GB",
        "peak resident, GB",
        "of it not backed by files, GB",
    ]
    row = [
        f"{found['training_roots']:,}",
        f"{found['training_roots'] * per_root / 1e9:.1f}",
        f"{disk / 1e9:.1f}",
    ]
    row += [f"{found[key] / 1e9:.2f}" for key in ("peak", "anonymous")]
    row += [f"{made:.0f} s", f"{found['seconds']:.0f} s"]
    command = (
        f"python -m benchmarks.selector_memory --scale {options.scale:g} --folds {options.folds}"
    )
    command += (
        f" --verifiers {' '.join(options.verifiers)}" if options.verifiers != VERIFIERS else ""
    )
    report("selector_memory", command, [*names, "writing the store", "selecting"], [row])


if __name__ == "__main__":
    main()
