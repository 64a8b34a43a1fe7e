"""The parts of a step from measured steps: least squares and isotonic fits, pure functions of
times.

draft phase of (1, 0, 0) and of trees of depth 1  ->  first: the step's first draft pass. The target
                                                      ran before it, so the draft's weights are
                                                      cold.
what deeper trees take more                       ->  draft: a later pass, warm, by the width of its
                                                      level, and second: what the first of them
                                                      takes more than the others
target phase                                      ->  target: a pass over n nodes
all else                                          ->  verify: warping, the rule, commits
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nde_talf.decoding.actions import L2_MAX, Action
from nde_talf.selector.latency import NODES, WIDTHS, LatencyTable

PROBES = tuple(
    Action(*action)
    for action in (
        *((1, 0, 0), (1, 0, 1), (4, 0, 1), (1, 0, 2), (1, 0, 4), (1, 0, 7), (1, 0, 11), (1, 0, 16)),
        *((2, 0, 2), (2, 2, 8), (3, 4, 4), (3, 0, 8), (4, 0, 2), (4, 0, 4), (4, 0, 8), (4, 8, 8)),
    )
)
"""The trees that are measured."""


class Probed(NamedTuple):
    """One step. context: index of its context; seconds: of the phases draft, target and all else;
    timed: whether the decoder waited for the device at the end of every phase.
    """

    context: int
    action: Action
    verifier: str
    timed: bool
    nodes: int
    seconds: tuple[float, float, float]


def fit_table(
    steps: Sequence[Probed], contexts: list[int], verifiers: Sequence[str], levels: dict[int, list]
) -> LatencyTable:
    """The parts whose sums are closest to what `steps` took, none of which falls with tokens or
    with context.

    levels: by K, for each drafted tree the number of distinct nodes at depth 1, 2, ... of its
    branches; empty where equal draws are not merged.
    """
    cells: dict[tuple, list[Probed]] = defaultdict(list)
    for step in steps:
        if step.timed:
            cells[step.context, step.action].append(step)
    means = {key: _middle([step.seconds for step in own]) for key, own in cells.items()}
    nodes = {
        action: float(np.mean([step.nodes for step in steps if step.action == action]))
        for action in PROBES
    }
    branches = [
        [_mean([own[d] for own in levels.get(k, ()) if len(own) > d], k) for d in range(L2_MAX)]
        for k in WIDTHS
    ]
    shallow, deep = (
        [action for action in PROBES if (action.depth > 1) == is_deep] for is_deep in (False, True)
    )
    rows = np.array([[1.0, *_passes(action, branches)] for action in deep])
    first, second, draft, target = [], [], [], []
    for index in range(len(contexts)):
        own = {action: means[index, action] for action in PROBES}
        first.append(float(np.mean([own[action][0] for action in shallow])))
        rest = np.array([own[action][0] for action in deep]) - first[-1]
        scale = 1 / np.maximum(rest, 1e-9)  # relative errors count
        passes = np.linalg.lstsq(rows * scale[:, None], rest * scale, rcond=None)[0]
        if passes[0] < 0:
            passes[1:] = np.linalg.lstsq(rows[:, 1:] * scale[:, None], rest * scale, rcond=None)[0]
        second.append(max(0.0, float(passes[0])))
        draft.append(rising(passes[1:]))
        target.append(_at([nodes[a] for a in PROBES], [own[a][1] for a in PROBES], NODES))
    verify = {}
    for name in verifiers:
        took: dict[Action, list[float]] = defaultdict(list)
        for step in steps:
            if step.timed and step.verifier == name:
                took[step.action].append(step.seconds[2])
        verify[name] = _at(
            [nodes[a] for a in took], [float(_middle(own)) for own in took.values()], NODES
        )
    factor = _untimed_factor(steps)
    parts = {"first": first, "second": second, "draft": draft, "target": target}
    spread = [
        np.subtract(*np.percentile([sum(s.seconds) for s in own], [75, 25])) / means[key].sum()
        for key, own in cells.items()
    ]
    return LatencyTable(
        contexts,
        list(NODES),
        list(WIDTHS),
        verify={name: (factor * times).tolist() for name, times in verify.items()},
        branches=branches if levels else [],
        spread=float(np.median(spread)),
        **{
            name: (factor * np.maximum(rising(np.array(part)), 1e-9)).tolist()
            for name, part in parts.items()
        },
    )


def rising(values: np.ndarray) -> np.ndarray:
    """Isotonic regression by pooling adjacent violators: the closest sequence, in least squares,
    that does not fall along the first axis.

    Example: [1, 3, 2, 4] -> [1, 2.5, 2.5, 4]. Rows that rise on their own still do afterwards.
    """
    if values.ndim > 1:
        return np.stack([rising(column) for column in values.T], -1)
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    return np.concatenate([np.full(size, mean) for mean, size in blocks])


def _at(nodes: list[float], seconds: list[float], knots: Sequence[int]) -> np.ndarray:
    """Seconds at `knots`, from an isotonic fit to the points; beyond the largest point along the
    fit's overall slope.
    """
    order = np.argsort(nodes, kind="stable")
    x, y = np.array(nodes)[order], rising(np.array(seconds)[order])
    slope = (y[-1] - y[0]) / max(1.0, x[-1] - x[0])
    return np.interp(knots, x, y) + slope * np.maximum(0, np.array(knots) - x[-1])


def _passes(action: Action, branches: list[list[float]]) -> np.ndarray:
    """[widths]: how many later draft passes of each width an action takes, those between two widths
    shared out.
    """
    trunk = min(action.l1, action.depth - 1)
    below = action.depth - 1 - trunk
    levels = [1.0] * trunk + ([1.0] * below if action.k == 1 else branches[action.k - 1][:below])
    return np.array([np.interp(levels, WIDTHS, unit).sum() for unit in np.eye(len(WIDTHS))])


def _untimed_factor(steps: Sequence[Probed]) -> float:
    """What a step takes over what it takes where the host waits for the device after every phase."""
    totals: dict[bool, dict[tuple, list[float]]] = {
        True: defaultdict(list),
        False: defaultdict(list),
    }
    for step in steps:
        totals[step.timed][step.context, step.action].append(sum(step.seconds))
    ratios = [np.median(own) / np.median(totals[True][key]) for key, own in totals[False].items()]
    return float(np.median(ratios)) if ratios else 1.0


def _middle(values: Sequence) -> np.ndarray:
    """Mean along the first axis without the smallest and the largest tenth."""
    cut = len(values) // 10
    return np.sort(values, 0)[cut : len(values) - cut].mean(0)


def _mean(values: list[float], otherwise: float) -> float:
    return float(np.mean(values)) if values else float(otherwise)
