"""“Greedy Multi-Path Block Verification” (GBV): Tables 1 to 4, 6 and 7.

    python -m benchmarks.papers.gbv --run checkpoints/default

K = 1 is block verification. Tokens a target pass and milliseconds a token, by K and the length of
the paths, and beside other rules on several paths.
"""

import argparse
from functools import partial

from benchmarks.papers.shared import LENGTH, MS, SPEED, Bench, options_of, table
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import Action
from nde_talf.decoding.policies.delayed import Delayed

PATH, KS = 8, (1, 2, 3, 4)
RULES = {"GBV": "gbv", "SpecTr": "spectr", "SpecInfer": "specinfer", "Traversal": "traversal"}


def method(rule: str, k: int, length: int) -> tuple:
    """A rule on k paths from the root; with one path GBV is block verification."""
    return Delayed(Action(k, 0, length)), "bv" if rule == "gbv" and k == 1 else rule


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    bench, shortest = Bench(options), options.lengths[0]
    grid = {
        f"K={k}, L={length}": method("gbv", k, length) for length in options.lengths for k in KS
    }
    decoded = bench.decode("gbv-lengths", SETTINGS["t1.0"], grid)
    for title, measure in (("Tables 1 and 3", LENGTH), ("Tables 2 and 4", MS)):
        table(
            f"{title}: {measure}, temperature 1",
            "Method",
            [name for name in grid if name.endswith(f"L={shortest}")],
            bench.kinds,
            partial(decoded.figure, measure),
        )
    table(
        "Table 6 and Profile: lengths of the paths, and where the time goes, temperature 1",
        "Method",
        grid,
        [LENGTH, MS, SPEED, "draft", "target", "nodes"],
        lambda name, measure: decoded.figure(measure, name),
    )
    for name in ("t0.2", "t1.0"):
        rules = {
            f"{title}, K={k}": method(rule, k, PATH) for title, rule in RULES.items() for k in KS
        }
        others = bench.decode(f"gbv-rules-{name}", SETTINGS[name], rules)
        table(
            f"Table 7: rules on K paths of {PATH} tokens, {SETTINGS[name]}",
            "Method",
            rules,
            [LENGTH, MS, SPEED],
            lambda rule, measure, others=others: others.figure(measure, rule),
        )


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 24])
    report(parser.parse_args())


if __name__ == "__main__":
    main()
