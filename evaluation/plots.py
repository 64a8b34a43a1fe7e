"""The report's plots: functions from results to matplotlib figures, without global state.

Each takes a dict of one part (a sampling setting, say) or several, and draws a panel for each: the
page shows every part by itself at the width of a telephone, PNGs show them together.
"""

import re
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib import rc_context, rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nde_talf.decoding.stats import PHASES
from nde_talf.evaluation.loops import TITLES, is_outside
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.table import Row, control_of
from nde_talf.evaluation.text import ordinal

OURS, OTHERS, PLAIN, INK, GRID = "#0072b2", "#9aa5b1", "#cbd2d9", "#1f2933", "#e4e7eb"
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe-Ito: told apart without red and green
WIDTH = 9.0  # inches, at 100 dots each
PANEL = 4.4  # inches: of one panel on the page

# Colours of the page that stand in for those of a picture, so that it follows the page into dark
# mode.
THEMED = {
    INK: "ink",
    "#000000": "ink",
    GRID: "line",
    OURS: "blue",
    OTHERS: "grey",
    PLAIN: "pale",
    "#009e73": "green",
}

# Of lines: a draft head; a selector that chooses; code that is not ours.
LEARNED, CHOOSES, OUTSIDE = OURS, "#56b4e9", "#7b8794"
# Of a verification rule, none of them blue or grey. Rules that are one function under two names
# share a colour.
RULES = {
    "Naive": "#d55e00",
    "NaiveTree": "#d55e00",
    "BV": "#009e73",
    "Traversal": "#009e73",
    "NSS": "#cc79a7",
    "SpecInfer": "#e69f00",
    "SpecTr": "#8b5cf6",
    "Khisti": "#c51b7d",
    "GBV": "#7ad151",
    "Any rule": "#8c6d31",
}
QUANTILES = ["1 %", "5 %", "25 %", "50 %", "75 %"]  # of `worst_quantiles`

styled = rc_context(
    rc_params_from_file(Path(__file__).with_name("report.mplstyle"), use_default_template=False)
)
"""Decorates a function that draws a figure of the report."""

Tables = dict[str, list[Row]]
Curves = dict[str, dict[str, list[tuple[int, float]]]]


def line(method: str) -> dict[str, object]:
    """Colour ("color") and dashes ("ls") of a method by its name, or of a solver by its key in
    TITLES: the same in every plot, whatever other methods there are.
    """
    title = TITLES.get(method, method)
    rule = max((own for own in RULES if title.startswith(own)), key=len, default="")
    if is_outside(title):
        return {"color": OUTSIDE, "ls": "-"}
    if "head" in title:
        return {"color": LEARNED, "ls": "-"}
    if title.endswith("(NDE)"):
        return {"color": CHOOSES, "ls": {"Traversal": "-", "SpecInfer": "--"}.get(rule, ":")}
    marks = {
        "τ": (0, (3, 1, 1, 1, 1, 1)),
        "selector: static": (0, (5, 1, 1, 1)),
        ", by entropy": ":",
        ", by domain": "-.",
    }
    beside = "-" if rule not in ("Naive", "BV", "") else "--"  # the other rule of a colour, or none
    return {
        "color": RULES.get(rule, OUTSIDE),
        "ls": next((d for mark, d in marks.items() if rule and mark in title), beside),
    }


def new_figure(
    rows: int, columns: int, height: float, width: float = WIDTH, **options
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches in the report's style, and its axes in reading order."""
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for axis in axes:
        axis.tick_params(colors=INK, labelsize=8, grid_color=GRID)
    return figure, axes


def panels(parts: dict, *shape, **options) -> tuple[Figure, list[Axes]]:
    """A `new_figure` with a panel for each of `parts`, which has its key as a title where there are
    several.
    """
    figure, axes = new_figure(*shape, **options)
    for axis, title in zip(axes, parts, strict=True):
        axis.set_title(title if len(parts) > 1 else "")
    return figure, axes


def whiskers(values: list[list[float]]) -> list[list[float]]:
    """Lengths of error bars down and up, of [value, low, high]."""
    return [[max(0.0, v[0] - v[1]) for v in values], [max(0.0, v[2] - v[0]) for v in values]]


def svg(figure: Figure, name: str) -> str:
    """A figure as an SVG element for the page, with the page's colours; name: makes its ids the
    page's only ones.
    """
    buffer = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    for colour, variable in THEMED.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    return re.sub(r'( id="|url\(#|href="#)', lambda found: found[1] + f"{name}-", text)


def legend(figure: Figure, axes: list[Axes]) -> Figure:
    """Above the axes, in as many columns as the width has room for; a label that several axes have
    is listed once.
    """
    found = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    room = max(
        1, int(figure.get_size_inches()[0] / (0.5 + 0.075 * max(map(len, found), default=1)))
    )
    figure.legend(
        found.values(), found, loc="outside upper left", ncols=min(room, max(len(found), 1))
    )
    return figure


def bars(tables: Tables, extra: float, width: float, x: str) -> tuple[Figure, list[Axes]]:
    """A figure of horizontal bars, a row a method and a panel a sampling setting; `extra` inches
    are not for rows.
    """
    heights = [0.5 + 0.28 * len(rows) for rows in tables.values()]
    figure, axes = panels(
        tables, len(tables), 1, extra + sum(heights), width, sharex=True, height_ratios=heights
    )
    for axis in axes:
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
    axes[-1].set_xlabel(x)
    return figure, axes


@styled
def speed_bars(tables: Tables, learned: dict[str, set[str]], width: float = WIDTH) -> Figure:
    """Speed-up over autoregressive decoding by method, one panel a sampling setting.

    Methods of `learned` (by setting) have a colour of their own; the band is the A/A control's
    interval, which smaller differences do not leave.
    """
    figure, axes = bars(tables, 0.4, width, "tokens/s over plain decoding's")
    furthest = max((row.speedup[2] for rows in tables.values() for row in rows), default=1.0)
    for axis, (setting, rows) in zip(axes, tables.items(), strict=True):
        if control := control_of(rows):
            axis.axvspan(control[1], control[2], color=SERIES[1], alpha=0.25, lw=0)
        names, speeds, ours = (
            [row.method for row in rows],
            [row.speedup for row in rows],
            learned.get(setting, set()),
        )
        colours = [
            OURS if n in ours else PLAIN if n in (BASELINE, CONTROL) else OTHERS for n in names
        ]
        error = {"ecolor": INK, "lw": 1}
        axis.barh(
            names,
            [speed[0] for speed in speeds],
            0.62,
            xerr=whiskers(speeds),
            color=colours,
            error_kw=error,
        )
        for i, speed in enumerate(speeds):
            axis.text(speed[2] + 0.015 * furthest, i, f"{speed[0]:.2f}×", va="center")
        axis.axvline(1, color=INK, lw=0.8, ls=":")
        axis.set_xlim(0, 1.14 * furthest)
    return figure


@styled
def phase_fractions(tables: Tables, width: float = WIDTH) -> Figure:
    """Where a step's time goes, by method; tables: of rows with phases."""
    figure, axes = bars(tables, 0.7, width, "fraction of step time, %")
    for axis, rows in zip(axes, tables.values(), strict=True):
        parts = np.array([[100 * row.shares[phase] for phase in PHASES] for row in rows])
        for i, (phase, colour) in enumerate(zip(PHASES, SERIES, strict=True)):
            axis.barh(
                [row.method for row in rows],
                parts[:, i],
                0.62,
                parts[:, :i].sum(1),
                color=colour,
                label=phase,
            )
        axis.set_xlim(0, 100)
    return legend(figure, axes)


@styled
def position_lines(acceptance: dict[str, dict[str, list[float]]], width: float = WIDTH) -> Figure:
    """Fraction of the steps that accept a drafted token at position 1, 2, ..., one panel a setting
    and one line a method.
    """
    figure, axes = panels(acceptance, 1, len(acceptance), 3.4, width, sharey=True)
    for axis, methods in zip(axes, acceptance.values(), strict=True):
        for name, fractions in methods.items():
            axis.plot(
                range(1, len(fractions) + 1),
                [100 * x for x in fractions],
                marker="o",
                label=name,
                **line(name),
            )
        axis.set(ylim=(0, 100), xlabel="position in the draft")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("steps that accept it, %")
    return legend(figure, axes)


@styled
def loss_curves(curves: Curves, width: float = WIDTH) -> Figure:
    """Training (and, where there are any, held-out) losses; one panel a training.

    A series of one value is a point.
    """
    shown = {name: losses for name, series in curves.items() if (losses := losses_of(series))}
    figure, axes = panels(shown, 1, len(shown), 2.6, width)
    for axis, losses in zip(axes, shown.values(), strict=True):
        for key, points in sorted(losses.items()):
            depth = key.removeprefix("loss_depth_")  # a head's depths count from 0
            name = (
                f"{ordinal(int(depth) + 1)} drafted token"
                if depth.isdigit()
                else key.replace("_", " ")
            )
            axis.plot(
                *zip(*points, strict=True), marker="o" if len(points) < 12 else None, label=name
            )
        axis.set_xlabel("step")
        if len(losses) > 1:
            low, high = axis.get_ylim()
            axis.set_ylim(low, high + 0.35 * (high - low))  # the legend stands above the lines
            axis.legend(fontsize=7, loc="upper right")
    axes[0].set_ylabel("loss")
    return figure


def losses_of(series: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """A training's losses among its series: a head's by depth, where it has them."""
    by_depth = {key: points for key, points in series.items() if "loss_depth" in key}
    return by_depth or {
        key: points for key, points in series.items() if key.endswith("loss") and points
    }


@styled
def action_histogram(
    chosen: dict[str, dict[str, dict[str, int]]],
    static: dict[str, dict[str, str]],
    width: float = WIDTH,
    max_trees: int = 14,
) -> Figure:
    """Fraction of steps by tree, one panel for every setting and selector of `chosen`; the best
    static tree of the same (in `static`) is marked, and drawn even where it was never chosen.
    """
    parts = {
        f"{name}, {s}": (static.get(s, {}).get(name), Counter(own[name]))
        for s, own in chosen.items()
        for name in own
    }
    figure, axes = panels(parts, len(parts), 1, 2.9 * len(parts), width)
    for axis, (best, counts) in zip(axes, parts.values(), strict=True):
        top = dict(counts.most_common(max_trees)) | (
            {best: counts[best]} if best is not None else {}
        )
        if rest := counts.total() - sum(top.values()):
            top["others"] = rest
        colours = [{best: SERIES[1], "others": OTHERS}.get(tree, OURS) for tree in top]
        axis.bar(list(top), [100 * steps / counts.total() for steps in top.values()], color=colours)
        axis.tick_params(axis="x", rotation=70, labelsize=7)
        axis.grid(visible=False, axis="x")
        axis.set_ylabel("fraction of steps, %")
    axes[-1].set_xlabel("tree (K, L1, L2); a single path is (1, 0, L)")
    return figure


@styled
def selector_ratios(offline: dict, width: float = WIDTH) -> Figure:
    """Held-out tokens/s against the best static action of each setting, offline: one column a
    selector, one row a latency table.
    """
    kinds = {
        "selector": "selector",
        "static_domain": "best static by domain",
        "entropy_rule": "by draft entropy",
        "static_l1_0": "best static, L1 = 0",
    }
    tables = list(next(iter(offline.values())))
    parts = {f"{name}, {table}": offline[name][table] for table in tables for name in offline}
    height = 0.5 + 0.42 * (len(next(iter(parts.values()))["settings"]) + 1)
    figure, axes = panels(
        parts,
        len(tables),
        len(offline),
        0.8 + len(tables) * height,
        width,
        sharey=True,
        sharex=True,
    )
    for axis, own in zip(axes, parts.values(), strict=True):
        groups = {**own["settings"], "all settings": own["all"]}
        bounds = np.sort(
            [(group["split_half"][0], group["same_half"][0]) for group in groups.values()]
        ).T
        axis.barh(
            range(len(groups)),
            bounds[1] - bounds[0],
            0.75,
            bounds[0],
            color=GRID,
            label="root by root, bounds",
        )
        for offset, ((key, name), colour) in enumerate(zip(kinds.items(), SERIES, strict=True)):
            if key in own["all"]:
                at = [i + 0.18 * (offset - 1.5) for i in range(len(groups))]
                values = [group[key] for group in groups.values()]
                style = {"fmt": "o", "ms": 3.5, "lw": 1, "color": colour, "label": name}
                axis.errorbar([v[0] for v in values], at, xerr=whiskers(values), **style)
        axis.axvline(1, color=INK, lw=0.8, ls=":")
        axis.set_yticks(range(len(groups)), list(groups))
        axis.grid(visible=False, axis="y")
    axes[0].invert_yaxis()
    figure.supxlabel(
        "held-out tokens/s relative to the best static tree (95 % interval)", fontsize=8
    )
    return legend(figure, sorted(axes, key=lambda axis: -len(axis.get_legend_handles_labels()[0])))


@styled
def choice_by_entropy(offline: dict, width: float = WIDTH) -> Figure:
    """Mean depth and size of the trees that a selector chooses, by the draft's entropy at the root:
    one row for every selector and setting under which it chooses, one line a latency table.

    `offline` is cut to these by `chooses`.
    """
    rows = {
        f"{name}, {setting}: ": {
            table: own["settings"][setting]["by_entropy"] for table, own in tables.items()
        }
        for name, tables in offline.items()
        for setting in next(iter(tables.values()))["settings"]
    }
    parts = {
        f"{title if len(rows) > 1 else ''}mean {key}": (key, rows[title])
        for title in rows
        for key in ("depth", "nodes")
    }
    figure, axes = panels(parts, len(rows), 2, 0.4 + 2.4 * len(rows), width)
    for axis, (key, tables) in zip(axes, parts.values(), strict=True):
        for table, points in tables.items():
            axis.plot(
                [p["entropy"] for p in points], [p[key] for p in points], marker="o", label=table
            )
        axis.set_xlabel("draft's entropy, nats")
        axis.set_ylim(bottom=0)
    return legend(figure, axes[:1])


def chooses(offline: dict) -> dict:
    """The part of the offline report in which a network chooses and its trees are known setting by
    setting: neither static exports nor reports of older versions.
    """
    found: dict[str, dict] = {}
    for name, tables in offline.items():
        for table, own in tables.items():
            settings = {
                key: value
                for key, value in own["settings"].items()
                if value["learned"] and "by_entropy" in value
            }
            if settings:
                found.setdefault(name, {})[table] = {**own, "settings": settings}
    return found


@styled
def acceptance_curves(rates: dict[str, dict[str, list[float]]], width: float = WIDTH) -> Figure:
    """Acceptance rate of every solver by depth on the draft's path, one panel a setting (Figure 1
    of the NDE paper).

    The last one is the optimum.
    """
    figure, axes = panels(rates, 1, len(rates), 3.4, width, sharey=True)
    for axis, by_solver in zip(axes, rates.values(), strict=True):
        for name, values in by_solver.items():
            style = {"color": INK, "ls": "--"} if name == list(by_solver)[-1] else line(name)
            axis.plot(values, marker="o", label=name, **style)
        axis.set_xlabel("depth on the draft's path")
    axes[0].set_ylabel("acceptance rate, four draws")
    return legend(figure, axes)
