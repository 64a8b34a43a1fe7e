"""“DynaTree” (Chen et al.): Tables 1 to 5.

    python -m benchmarks.papers.dynatree --run checkpoints/default

Greedy. The thresholds that the paper tunes and does not print are TUNED: fixed, not tuned here.
`claims.py` tunes them on training prompts (`tuned`).
"""

import argparse
import gc
import random
import time
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import mean, median
from typing import Any

import torch

from benchmarks.papers.shared import LENGTH, MS, SPEED, Bench, options_of, table
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig, History
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree
from nde_talf.evaluation.protocol import BASELINE
from nde_talf.evaluation.tuning import Candidate, Method, Tuner

TUNED = {"stop": 0.005, "deep": 0.1, "prune": 0.002}
"""rho_stop, rho_deep and tau."""
LINEAR, FIXED, GROWN, FULL = (
    "Linear, K = 5",
    "Fixed tree, D = 5, B = 2",
    "+ breadth and depth",
    "DynaTree",
)
SWEEP = {
    "Depth: D0 = 3, Dmax = 6": {"depth": 3, "max_depth": 6},
    "Depth: D0 = 8, Dmax = 12": {"depth": 8, "max_depth": 12},
    "Branches: Bmin = 1, Bmax = 2": {"branches": (1, 2, 2)},
    "Branches: Bmin = 1, Bmax = 4": {"branches": (1, 2, 4)},
    "Thresholds: (0.9, 0.7)": {"confident_low": 0.7},
    "Thresholds: (0.8, 0.4)": {"confident_high": 0.8},
}
"""Rows of Table 5."""


class AsRun(DynaTree):
    """DynaTree with its authors' schedule of the history.

    Once a generation the mean path length over D_0 + 2 is steered to 0.7 +- 0.1. What was learned
    goes on to the next prompt.
    """

    def __init__(self, config: DynaTreeConfig):
        super().__init__(replace(config, window=0))
        self.history = History(replace(config, window=1, low=0.6, high=0.8))
        self.lengths: list[float] = []

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft as DynaTree does, with the history of the generations before."""
        if state.tau is not None:
            self.lengths.append((state.tau + 1) / (self.history.depth + 2))
        elif self.lengths:
            self.history.learn(mean(self.lengths))
            self.lengths = []
        state.memory[self] = self.history
        return super().draft(state, drafter, rng)


def tuned(bench: Bench, setting: SamplingSetting, drawn: SamplingSetting) -> dict[str, float]:
    """Choose rho_stop, rho_deep and tau by the clock, on prompts that no table uses."""

    def candidate(own: dict[str, Any]) -> Candidate:
        method = AsRun(DynaTreeConfig(nodes=63, **own)), "greedy"
        return Candidate(str(own), lambda title, _: bench.ours(title, method, setting, drawn), own)

    grid = [
        candidate(dict(zip(TUNED, values, strict=True)))
        for values in product((0.005, 0.02, 0.05), (0.1, 0.3), (0.002, 0.01))
    ]
    tuner = Tuner(bench.folder / "dynatree.json", bench.options.new_tokens, bench.tuning)
    return tuner(Method("DynaTree", "DynaTree", grid)).options


def first_tokens(bench: Bench, methods: dict[str, tuple], *settings: SamplingSetting) -> list[list]:
    """Measure the time to the first token and the memory of each method (Tables 2 and 6).

    Returns:
        Rows of name, median CPU milliseconds over the prompts, and megabytes: the weights of the
        method's models and all tensors that a finished generation still holds.
    """
    target, draft = bench.models
    makes = {name: bench.ours(name, own, *settings) for name, own in methods.items()}
    times: dict[str, list[float]] = {name: [] for name in makes}
    for number, prompt in enumerate(bench.prompts):
        for name in random.Random(number).sample(list(makes), len(makes)):
            started = time.process_time()
            next(iter(makes[name].blocks(prompt.tokens, 0)))
            times[name].append(1e3 * (time.process_time() - started))
    rows = []
    for name, make in makes.items():
        before, stream = held(), make.blocks(bench.prompts[0].tokens, 0)
        deque(stream, maxlen=0)
        models = [target] if make.decoder.drafter is None else [target, draft]
        weights = sum(p.nbytes for model in models for p in model.module.parameters())
        held_now = weights + held() - before
        rows.append([name, f"{median(times[name]):.1f}", f"{held_now / 1e6:.1f}"])
        del stream
    return rows


def held() -> int:
    """Count the bytes of all tensors that are alive."""
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    storages = [each.untyped_storage() for each in alive if each.layout is torch.strided]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    bench, greedy = Bench(options), "greedy"
    config = DynaTreeConfig(nodes=options.nodes, **TUNED)
    methods = {
        LINEAR: (Shaped(fixed_shape(5, 1, 5), "top_k"), greedy),
        FIXED: (Shaped(fixed_shape(5, 2, options.nodes), "top_k"), greedy),
        GROWN: (DynaTree(replace(config, window=0)), greedy),
        FULL: (DynaTree(config), greedy),
        **{name: (DynaTree(replace(config, **own)), greedy) for name, own in SWEEP.items()},
    }
    decoded = bench.decode("dynatree", SamplingSetting(0.0), methods, SamplingSetting(0.5))
    for title, names in (
        ("Tables 1 to 3", [BASELINE, LINEAR, FIXED, FULL]),
        ("Table 4: ablation", [FIXED, GROWN, FULL]),
        ("Table 5: sensitivity", [FIXED, *SWEEP]),
    ):
        for measure in (SPEED, MS, LENGTH):
            cell = partial(decoded.figure, measure)
            table(f"{title}, {measure}", "Method", names, bench.kinds, cell)


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 256)
    parser.add_argument("--nodes", type=int, default=256, help="of the largest tree")
    report(parser.parse_args())


if __name__ == "__main__":
    main()
