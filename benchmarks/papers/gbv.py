"""“Greedy Multi-Path Block Verification” (GBV): Tables 1 to 4, 6 and 7.

    python -m benchmarks.papers.gbv --run checkpoints/default

K = 1 is block verification. Tokens a target pass and milliseconds a token, by K and the length of
the paths, and beside other rules on several paths.
"""

import argparse

from benchmarks.papers.shared import Bench, Decoded, options_of, table
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import Action
from nde_talf.decoding.policies.delayed import Delayed

LENGTH, KS = 8, (1, 2, 3, 4)
RULES = {"GBV": "gbv", "SpecTr": "spectr", "SpecInfer": "specinfer", "Traversal": "traversal"}
EFFICIENCY, MS, SPEED = "tokens a target pass", "ms a token", "over plain decoding"


def method(rule: str, k: int, length: int) -> tuple:
    """A rule on k paths from the root; with one path GBV is block verification."""
    return Delayed(Action(k, 0, length)), "bv" if rule == "gbv" and k == 1 else rule


def figure(decoded: Decoded, method: str, measure: str, kind: str | None = None) -> str:
    """A cell."""
    of = {EFFICIENCY: decoded.length, MS: decoded.milliseconds, SPEED: decoded.speed}
    return of[measure](method, kind)


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    bench = Bench(options)
    grid = {
        f"K={k}, L={length}": method("gbv", k, length) for length in options.lengths for k in KS
    }
    decoded = bench.decode("gbv-lengths", SETTINGS["t1.0"], grid)
    for title, measure in (("Tables 1 and 3", EFFICIENCY), ("Tables 2 and 4", MS)):
        table(
            f"{title}: {measure}, temperature 1, paths of {options.lengths[0]} tokens",
            ["Set"],
            [[kind] for kind in bench.kinds],
            [f"K={k}" for k in KS],
            lambda row, k, measure=measure: figure(
                decoded, f"{k}, L={options.lengths[0]}", measure, row[0]
            ),
        )
    measures = {
        EFFICIENCY: decoded.length,
        MS: decoded.milliseconds,
        SPEED: decoded.speed,
        "draft": lambda name: decoded.share(name, "draft"),
        "target": lambda name: decoded.share(name, "target"),
        "nodes": decoded.nodes,
    }
    table(
        "Table 6 and Profile: lengths of the paths, and where the time goes, temperature 1",
        ["Method"],
        [[name] for name in grid],
        list(measures),
        lambda row, column: measures[column](row[0]),
    )
    for name in ("t0.2", "t1.0"):
        rules = {
            f"{title}, K={k}": method(rule, k, LENGTH) for title, rule in RULES.items() for k in KS
        }
        others = bench.decode(f"gbv-rules-{name}", SETTINGS[name], rules)
        table(
            f"Table 7: rules on K paths of {LENGTH} tokens, {SETTINGS[name]}",
            ["Method"],
            [[title] for title in rules],
            [EFFICIENCY, MS, SPEED],
            lambda row, measure, others=others: figure(others, row[0], measure),
        )


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 24])
    report(parser.parse_args())


if __name__ == "__main__":
    main()
