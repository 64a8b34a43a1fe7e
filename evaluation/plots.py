"""The report's four pictures, as matplotlib figures without global state.

A picture has a panel per part, for example per sampling setting.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context, rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.report_data import ReportData
from nde_talf.evaluation.table import Row, control_of

OURS, OTHERS, PLAIN, INK, GRID = "#0072b2", "#9aa5b1", "#cbd2d9", "#1f2933", "#e4e7eb"
BAND, OUTSIDE = "#e69f00", "#cc79a7"
WIDTH, WRAPPED = 5.0, 24  # inches, which fill a narrow screen; letters of a name in a line
MOST_TREES = 14  # of a histogram

styled = rc_context(
    rc_params_from_file(Path(__file__).with_name("report.mplstyle"), use_default_template=False)
)
"""Decorates a function that draws a figure of the report."""


@styled
def figure_of(
    parts: dict[str, Any],
    draw: Callable[[Axes, Any], None],
    heights: list[float],
    x: str,
    y: str = "",
) -> Figure:
    """Draw a picture of the report: a panel for every part, one below the other.

    Args:
        parts: content of the panels, by title.
        draw: draws a part into its panel.
        heights: of the panels, in inches.
        x: label of the lowest axis.
        y: label of the other axes.
    """
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4))
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights).ravel()
    handles: dict[str, Any] = {}
    for axis, (title, part) in zip(axes, parts.items(), strict=True):
        axis.tick_params(colors=INK, labelsize=9, grid_color=GRID)
        axis.set_title(title)
        axis.set_ylabel(y)
        draw(axis, part)
        lines, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    axes[-1].set_xlabel(x)
    if handles:  # one legend, with each label once
        columns = max(1, int(WIDTH / (0.6 + 0.085 * max(map(len, handles)))))
        figure.legend(handles.values(), handles, loc="outside upper left", ncols=columns)
    return figure


def unbroken(text: str) -> str:
    """Keep the shapes of trees, such as (1, 0, 4), in one line."""
    return re.sub(r"\([\d, ]+\)", lambda tree: tree[0].replace(" ", "\N{NO-BREAK SPACE}"), text)


def colour_of(row: Row, learned: Collection[str]) -> str:
    """Return the colour of a method's role, the same in every setting."""
    if row.method in (BASELINE, CONTROL):
        return PLAIN
    return OUTSIDE if row.outside else OURS if row.method in learned else OTHERS


def speed_bars(axis: Axes, part: tuple[list[Row], Collection[str]]) -> None:
    """Draw speed-ups; the band is the A/A control's interval. part: rows, and learned methods."""
    rows, learned = part
    if control := control_of(rows):
        axis.axvspan(control[1], control[2], color=BAND, alpha=0.25, lw=0)
    names = [textwrap.fill(unbroken(row.method), WRAPPED) for row in rows]
    colours = [colour_of(row, learned) for row in rows]
    values, low, high = np.array([row.speedup for row in rows]).T
    whiskers = np.maximum(0, [values - low, high - values])
    error = {"ecolor": INK, "lw": 1}
    axis.barh(names, values, 0.62, xerr=whiskers, color=colours, error_kw=error)
    furthest = max(*high, 1)
    for i, (value, end) in enumerate(zip(values, high, strict=True)):
        axis.text(max(end, 1) + 0.015 * furthest, i, f"{value:.2f}×", va="center")
    axis.axvline(1, color=INK, lw=0.8, ls=":")
    axis.set_xlim(0, 1.22 * furthest)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")


def lines(axis: Axes, part: dict[str, list[tuple[float, float]]]) -> None:
    """Draw a line of points for every name."""
    for name, points in part.items():
        marker = "o" if len(points) < 12 else None
        axis.plot(*zip(*points, strict=True), marker=marker, label=name)


def tree_bars(axis: Axes, part: dict[str, int]) -> None:
    """Draw the fraction of steps by tree."""
    counts = Counter(part)
    top = dict(counts.most_common(MOST_TREES))
    if rest := counts.total() - sum(top.values()):
        top["others"] = rest
    axis.barh(list(top), [100 * steps / counts.total() for steps in top.values()], color=OURS)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")


def losses(series: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Select a training's losses from its series; of a head, by drafted token."""
    by_token = {
        f"drafted token {int(key.split('loss_depth_')[1]) + 1}": points
        for key, points in sorted(series.items())
        if "loss_depth_" in key
    }
    whole = {k.replace("_", " "): points for k, points in series.items() if k.endswith("loss")}
    return by_token or whole


def pictures(data: ReportData) -> Iterator[tuple[str, str, Figure]]:
    """Yield section, name and figure of every picture with content.

    The template has a caption for each name.
    """
    speeds = {s: (rows, data.titles[s].learned) for s, rows in data.tables.items() if rows}
    positions = data.positions
    chosen = {
        f"{name}, {s}": counts
        for s, methods in data.chosen.items()
        for name, counts in methods.items()
    }
    curves = {name: shown for name, series in data.curves.items() if (shown := losses(series))}
    if speeds:
        heights = [0.5 + 0.42 * len(rows) for rows, _ in speeds.values()]
        bars = figure_of(speeds, speed_bars, heights, "tokens/s over plain decoding's")
        yield "speed", "speedup", bars
    if positions:
        labels = "position in the draft", "fraction of steps that accept it"
        yield (
            "acceptance",
            "positions",
            figure_of(positions, lines, [3.2] * len(positions), *labels),
        )
    if chosen:
        heights = [0.8 + 0.24 * min(MOST_TREES + 1, len(counts)) for counts in chosen.values()]
        labels = "steps with the tree (K, L1, L2), %", ""
        yield "selector", "actions", figure_of(chosen, tree_bars, heights, *labels)
    if curves:
        yield "training", "curves", figure_of(curves, lines, [3.0] * len(curves), "step", "loss")
