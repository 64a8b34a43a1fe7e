"""“Dynamic Delayed Tree Expansion” (NDE, Thomas et al.): Tables 2 to 5 and Figure 1.

    python -m benchmarks.papers.nde --run checkpoints/default

The run needs traces, a latency table and selectors. Every rule has the static tree that is best by
the labels, of delayed trees too; NDE's rows take the tree that the run's selector chooses at every
step.
"""

import argparse

from benchmarks.papers.shared import EIGHT, LENGTH, SPEED, Bench, options_of, table
from benchmarks.trajectories import acceptance_by_depth, draft_paths
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.data.traces.store import TraceStore
from nde_talf.evaluation import methods
from nde_talf.evaluation.loops import TITLES
from nde_talf.evaluation.methods import plan_methods
from nde_talf.evaluation.static_trees import StaticTrees
from nde_talf.evaluation.tuning import Tuner
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector
from nde_talf.selector.roots import Roots, roots_from_traces

DEPTHS = 8


def labelled(bench: Bench) -> Roots:
    """The training roots of the run with the labels of all rules that were traced."""
    columns = TraceStore(bench.options.run / "traces").read("train")
    return roots_from_traces(columns, [rule for rule in TITLES if rule in columns])


def planned(bench: Bench, name: str, roots: Roots) -> methods.Plan:
    """Every traced rule under its best static tree, and the run's selectors."""
    exports = bench.options.run / "selector" / "export"
    selectors = {
        folder.name: Selector.from_pretrained(folder)
        for folder in sorted(exports.iterdir() if exports.is_dir() else ())
    }
    prices = LatencyTable.load(bench.options.run / "latency" / "table.json")
    parts = methods.Bench(
        *bench.models,
        SETTINGS[name],
        Tuner(bench.folder / "tuned.json", bench.options.new_tokens, []),
        StaticTrees.of(roots, prices, SETTINGS[name]),
        rules=[*selectors] or ["traversal"],
        selectors=selectors,
    )
    return plan_methods(parts, {"rules", "selector"})


def rates(bench: Bench, name: str) -> dict[str, list[float]]:
    """Acceptance of one of four draws by rule and depth along the draft's path, over all roots."""
    setting, prompts = SETTINGS[name], [prompt.tokens for prompt in bench.prompts]
    p, q = draft_paths(*bench.models, prompts, setting, setting, DEPTHS)
    found = acceptance_by_depth(p, q, 4)
    return {TITLES.get(rule, rule): values for rule, values in found.items()}


def report(options: argparse.Namespace) -> None:
    """Print the tables, and the figure's numbers."""
    bench = Bench(options)
    roots = labelled(bench)
    for name in options.settings:
        plan, setting = planned(bench, name, roots), SETTINGS[name]
        decoded = bench.run(f"nde-{name}", setting, plan.methods)
        for title, measure in (("Tables 2 and 4", LENGTH), ("Tables 3 and 5", SPEED)):
            table(
                f"{title}: {measure}, {setting}",
                "Method",
                [*plan.methods, *plan.same],
                ["all", *bench.kinds],
                lambda method, kind, plan=plan, decoded=decoded, measure=measure: decoded.figure(
                    measure, plan.same.get(method, method), None if kind == "all" else kind
                ),
            )
        found = rates(bench, name)
        table(
            f"Figure 1: acceptance of one of four draws by depth, {setting}",
            "Rule",
            found,
            [str(depth) for depth in range(DEPTHS)],
            lambda rule, depth, found=found: f"{found[rule][int(depth)]:.3f}",
        )


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 64)
    parser.add_argument(
        "--settings", nargs="+", choices=EIGHT, default=["t0.6", "t1.0"], help="that were traced"
    )
    report(parser.parse_args())


if __name__ == "__main__":
    main()
