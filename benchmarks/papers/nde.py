"""“Dynamic Delayed Tree Expansion” (NDE, Thomas et al.): Tables 2 to 5 and Figure 1.

    python -m benchmarks.papers.nde --run checkpoints/default

The run needs traces, a latency table and selectors. Every rule has the static tree that is best by
the labels, of delayed trees too; NDE's rows take the tree that the run's selector chooses at every
step.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.papers.shared import EIGHT, LENGTH, SPEED, Bench, options_of, table
from benchmarks.trajectories import acceptance_by_depth, draft_paths
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.evaluation.loops import TITLES
from nde_talf.evaluation.static_trees import STATIC, traced_index
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import PricedRoots, Roots, roots_from_traces

DEPTHS = 8
TREED = {
    "SpecInfer": "specinfer",
    "SpecTr": "spectr",
    "Khisti": "khisti_lp",
    "NaiveTree": "naivetree",
    "NSS": "nss",
}
"""The optimal-transport rules as they are printed, which the paper runs on trees."""
RULES = TREED | {"Traversal": "traversal"}
"""The rules that NDE chooses trees for."""


def labelled(bench: Bench) -> Roots:
    """The training roots of the run with the labels of all rules that were traced."""
    columns = TraceStore(bench.options.run / "traces").read("train")
    return roots_from_traces(columns, [rule for rule in TITLES if rule in columns])


def methods(
    bench: Bench,
    roots: Roots,
    at: str,
    paper: tuple[LatencyTable, Path] | None = None,
) -> dict[str, tuple]:
    """Rules under their best static trees by the labels, and with the run's selectors.

    paper: latencies that trees are chosen by, with Eq. 11, and a folder of other selectors.
    """
    run, chosen = bench.options.run, dict[str, tuple]()
    own = LatencyTable.load(run / "latency" / "table.json"), run / "selector" / "export"
    prices, exports = paper or own
    index = traced_index(roots.settings, SETTINGS[at])
    if index is None:
        raise UserError(f"--run {run}: it has no roots at {at}. Trace them: traces.settings=[{at}]")
    pricing = "eq11" if paper else "table"
    here = replace(roots.where(roots.setting == index), settings=[roots.settings[index]])
    here.setting = torch.zeros_like(here.setting)
    for name, rule in RULES.items():
        if rule in roots.samples:
            labels, allowed = STATIC[rule]
            best = PricedRoots.of(here, labels, prices, pricing).static(allowed)
            chosen[name] = Delayed(TREES[int(best)]), rule
        if (export := exports / rule).exists():
            selector = Selector.from_pretrained(export)
            chosen[f"{name} NDE"] = NeuralPolicy(selector, prices), rule
    return chosen


def rates(bench: Bench, name: str) -> dict[str, list[float]]:
    """Acceptance of one of four draws by rule and depth along the draft's path, over all roots."""
    setting, prompts = SETTINGS[name], [prompt.tokens for prompt in bench.prompts]
    p, q = draft_paths(*bench.models, prompts, setting, setting, DEPTHS)
    return {TITLES.get(rule, rule): values for rule, values in acceptance_by_depth(p, q, 4).items()}


def report(options: argparse.Namespace) -> None:
    """Print the tables, and the figure's numbers."""
    bench = Bench(options)
    roots = labelled(bench)
    for name in options.settings:
        made, setting = methods(bench, roots, name), SETTINGS[name]
        decoded = bench.decode(f"nde-{name}", setting, made)
        for title, measure in (("Tables 2 and 4", LENGTH), ("Tables 3 and 5", SPEED)):
            table(
                f"{title}: {measure}, {setting}",
                "Method",
                made,
                ["all", *bench.kinds],
                lambda method, kind, decoded=decoded, measure=measure: decoded.figure(
                    measure, method, None if kind == "all" else kind
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
