"""A latency table from timed steps: least squares and isotonic fits of the parts of a step.

draft phase of (1, 0, 0) and of trees of depth 1  ->  first: the step's first draft pass. The target
                                                      ran before it, so the draft's weights are
                                                      cold.
extra draft seconds of deeper trees               ->  draft: a later pass, warm, by the width of its
                                                      level, and second: extra seconds of the first
                                                      later pass over the others
target phase                                      ->  target: a pass over n nodes
all else                                          ->  verify: warping, the rule, commits
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import isotonic_regression, lsq_linear
from scipy.stats import trim_mean

from nde_talf.decoding.actions import L2_MAX, Action
from nde_talf.selector.prices import NODES, WIDTHS, LatencyTable, level_widths, rows_run

PROBES = tuple(
    Action(*action)
    for action in (
        *((1, 0, 0), (1, 0, 1), (4, 0, 1), (1, 0, 2), (1, 0, 4), (1, 0, 7), (1, 0, 11), (1, 0, 16)),
        *((2, 0, 2), (2, 2, 8), (3, 4, 4), (3, 0, 8), (4, 0, 2), (4, 0, 4), (4, 0, 8), (4, 8, 8)),
    )
)
"""Trees to measure."""
CUT = 0.1
"""Fraction of the smallest, and of the largest, times that no mean counts."""


class Probed(NamedTuple):
    """One timed step.

    context: index of its context. seconds: of the phases draft, target and all else.
    """

    context: int
    action: Action
    verifier: str
    nodes: int
    seconds: tuple[float, float, float]


def fit_table(
    steps: Sequence[Probed],
    contexts: list[int],
    verifiers: Sequence[str],
    levels: dict[int, list],
    by_branches: bool,
) -> LatencyTable:
    """Fit the parts whose sums are closest to the timed `steps`; none falls with tokens or context.

    Args:
        steps: as measured.
        contexts: committed tokens by index.
        verifiers: rules to price.
        levels: by K, for each drafted tree the numbers of distinct nodes at depth 1, 2, ... of its
            branches; empty if equal draws are not merged.
        by_branches: see `LatencyTable`.
    """
    probed = [[step for step in steps if step.action == action] for action in PROBES]
    nodes = [float(np.mean([step.nodes for step in of_probe])) for of_probe in probed]
    branches = _branches(levels)
    run, knots = nodes, [*NODES]
    if by_branches:
        run = rows_run(torch.tensor(PROBES)).tolist()
        knots.append(int(max(run)))
    rows = []  # by context
    for index in range(len(contexts)):
        at = [[step.seconds for step in each if step.context == index] for each in probed]
        draft, target, _ = trim_mean(at, CUT, axis=1).T  # by phase [probes]
        rows.append((*_draft_passes(draft, branches), _at(run, target, knots)))
    names = ("first", "second", "draft", "target")
    parts = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    return LatencyTable(
        contexts,
        knots,
        list(WIDTHS),
        verify={name: _rest(probed, name, nodes, knots).tolist() for name in verifiers},
        branches=branches if levels else [],
        by_branches=by_branches,
        **{name: np.maximum(rising(part), 1e-9).tolist() for name, part in parts.items()},
    )


def _rest(
    probed: list[list[Probed]], verifier: str, nodes: list[float], knots: Sequence[int]
) -> np.ndarray:
    """Return seconds of all else in a step under a verifier, by number of nodes."""
    points = [
        (size, trim_mean(took, CUT))
        for size, of_probe in zip(nodes, probed, strict=True)
        if (took := [step.seconds[2] for step in of_probe if step.verifier == verifier])
    ]
    sizes, seconds = zip(*points, strict=True)
    return _at(sizes, seconds, knots)


def _branches(levels: dict[int, list]) -> list[list[float]]:
    """Return the mean number of distinct nodes [K][depth]; K where no tree was so deep."""
    means = []
    for k in WIDTHS:
        counts = [[tree[d] for tree in levels.get(k, ()) if len(tree) > d] for d in range(L2_MAX)]
        means.append([float(np.mean(count)) if count else float(k) for count in counts])
    return means


def _draft_passes(
    seconds: np.ndarray, branches: list[list[float]]
) -> tuple[float, float, np.ndarray]:
    """Split draft phases: first pass, extra seconds of the second, later passes by width.

    seconds: [probes].
    """
    deep = np.array([action.depth > 1 for action in PROBES])
    rows = np.array([[1.0, *_passes(action, branches)] for action in PROBES if action.depth > 1])
    first = float(np.mean(seconds[~deep]))
    rest = seconds[deep] - first
    scale = 1 / np.maximum(rest, 1e-9)  # relative errors count
    least = [0.0] + [-np.inf] * len(WIDTHS)
    fit = lsq_linear(rows * scale[:, None], rest * scale, (least, np.inf), method="bvls")
    return first, fit.x[0], rising(fit.x[1:])


def rising(values: np.ndarray) -> np.ndarray:
    """Return the closest sequence, in least squares, that does not fall (isotonic regression).

    Along the first axis. Example: [1, 3, 2, 4] -> [1, 2.5, 2.5, 4]. Rows that rise stay rising.
    """
    return np.apply_along_axis(lambda column: isotonic_regression(column).x, 0, values)


def _at(nodes: Sequence[float], seconds: Sequence[float], knots: Sequence[int]) -> np.ndarray:
    """Interpolate seconds at `knots` from an isotonic fit to the points, flat beyond the last.

    No tree has more nodes on average than the largest that was timed.
    """
    order = np.argsort(nodes, kind="stable")
    return np.interp(knots, np.array(nodes)[order], rising(np.array(seconds)[order]))


def _passes(action: Action, branches: list[list[float]]) -> np.ndarray:
    """Count an action's later draft passes by width [widths].

    A pass between two widths is split between them.
    """
    levels = level_widths(action, branches)[:-1]
    return np.array([np.interp(levels, WIDTHS, unit).sum() for unit in np.eye(len(WIDTHS))])
