"""“DynaTree” (Chen et al.): Tables 1 to 5.

    python -m benchmarks.papers.dynatree --run checkpoints/default

Greedy. The thresholds that the paper tunes and does not print are TUNED: fixed, not tuned here.
"""

import argparse
from dataclasses import replace
from functools import partial

from benchmarks.papers.shared import LENGTH, MS, SPEED, Bench, options_of, table
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.evaluation.protocol import BASELINE

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
