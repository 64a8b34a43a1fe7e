"""The report's plots: functions from results to matplotlib figures, without global state.

Each takes a dict of one part (a sampling setting, say) or several, and draws a panel for each: the page shows every part by
itself at the width of a telephone, PNGs show them together.
"""

import re
from io import BytesIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decoding.loop import PHASES
from evaluation.assisted import is_assisted
from evaluation.methods import TITLES
from evaluation.protocol import BASELINE, CONTROL
from evaluation.table import Row, control_of
from evaluation.text import ordinal
from selector.ablation import FULL, NO_TAIL

OURS, OTHERS, PLAIN, INK, GRID = "#0072b2", "#9aa5b1", "#cbd2d9", "#1f2933", "#e4e7eb"
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe-Ito: told apart without red and green
WIDTH = 9.0  # inches, at 100 dots each
PANEL = 4.4  # inches: of one panel on the page

# Colours of the page that stand in for those of a picture, so that it follows the page into dark mode.
THEMED = {INK: "ink", "#000000": "ink", GRID: "line", OURS: "blue", OTHERS: "grey", PLAIN: "pale", "#009e73": "green"}

# Of lines: a draft head; a selector that chooses; code that is not ours.
LEARNED, CHOOSES, OUTSIDE = OURS, "#56b4e9", "#7b8794"
# Of a verification rule, none of them blue or grey. Rules that are one function under two names share a colour.
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

Tables = dict[str, list[Row]]
Curves = dict[str, dict[str, list[tuple[int, float]]]]


def line(method: str) -> dict[str, object]:
    """Colour ("color") and dashes ("ls") of a method by its name, or of a solver by its key in TITLES: the same in every plot,
    whatever other methods there are."""
    title = TITLES.get(method, method)
    rule = max((own for own in RULES if title.startswith(own)), key=len, default="")
    if is_assisted(title):
        return {"color": OUTSIDE, "ls": "-"}
    if "head" in title:
        return {"color": LEARNED, "ls": "-"}
    if title.endswith("(NDE)"):
        return {"color": CHOOSES, "ls": {"Traversal": "-", "SpecInfer": "--"}.get(rule, ":")}
    marks = {"τ": (0, (3, 1, 1, 1, 1, 1)), "selector: static": (0, (5, 1, 1, 1)), ", by entropy": ":", ", by domain": "-."}
    beside = "-" if rule not in ("Naive", "BV", "") else "--"  # the other rule of a colour, or none
    return {"color": RULES.get(rule, OUTSIDE), "ls": next((d for mark, d in marks.items() if rule and mark in title), beside)}


def new_figure(rows: int, columns: int, height: float, width: float = WIDTH, **options) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches in the report's style, and its axes in reading order."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.tick_params(colors=INK, labelsize=8)
        axis.set_axisbelow(True)
    return figure, axes


def label(axis: Axes, x: str = "", y: str = "", title: str = "", grid: str = "both") -> None:
    """Write on an axis what it shows, and draw its grid."""
    axis.grid(axis=grid, color=GRID)
    for text, write in ((x, axis.set_xlabel), (y, axis.set_ylabel)):
        if text:
            write(text, fontsize=8, color=INK)
    if title:
        axis.set_title(title, loc="left", fontsize=9, color=INK)


def titles(parts: dict) -> list[str]:
    """Titles of the panels: none where there is one."""
    return [*parts] if len(parts) > 1 else [""]


def whiskers(values: list[list[float]]) -> list[list[float]]:
    """Lengths of error bars down and up, of [value, low, high]."""
    return [[max(0.0, v[0] - v[1]) for v in values], [max(0.0, v[2] - v[0]) for v in values]]


def svg(figure: Figure, name: str) -> str:
    """A figure as an SVG element for the page, with the page's colours; name: makes its ids the page's only ones."""
    buffer = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    for colour, variable in THEMED.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    return re.sub(r'( id="|url\(#|href="#)', lambda found: found[1] + f"{name}-", text)


def legend(figure: Figure, axes: list[Axes]) -> None:
    """Above the axes, in as many columns as the width has room for; a label that several axes have is listed once."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    room = max(1, int(figure.get_size_inches()[0] / (0.5 + 0.075 * max(map(len, found), default=1))))
    columns = min(room, max(len(found), 1))
    figure.legend(found.values(), found, loc="outside upper left", ncols=columns, fontsize=8, frameon=False)


def speed_bars(tables: Tables, learned: dict[str, set[str]], width: float = WIDTH) -> Figure:
    """Speed-up over autoregressive decoding by method, one panel a sampling setting. Methods of `learned` (by setting) have a
    colour of their own; the band is the A/A control's interval, which smaller differences do not leave."""
    heights = [0.5 + 0.28 * len(rows) for rows in tables.values()]
    figure, axes = new_figure(len(tables), 1, 0.4 + sum(heights), width, sharex=True, height_ratios=heights)
    furthest = max((row.speedup[2] for rows in tables.values() for row in rows), default=1.0)
    for axis, title, (setting, rows) in zip(axes, titles(tables), tables.items(), strict=True):
        names, speeds, ours = [row.method for row in rows], [row.speedup for row in rows], learned.get(setting, set())
        colours = [OURS if n in ours else PLAIN if n in (BASELINE, CONTROL) else OTHERS for n in names]
        if control := control_of(rows):
            axis.axvspan(control[1], control[2], color=SERIES[1], alpha=0.25, lw=0)
        style = {"color": colours, "height": 0.62, "error_kw": {"ecolor": INK, "capsize": 2, "lw": 1}}
        axis.barh(names, [speed[0] for speed in speeds], xerr=whiskers(speeds), **style)
        for i, speed in enumerate(speeds):
            axis.text(speed[2] + 0.015 * furthest, i, f"{speed[0]:.2f}×", va="center", fontsize=8, color=INK)
        axis.axvline(1, color=INK, lw=0.8, ls=":")
        axis.invert_yaxis()
        axis.set_xlim(0, 1.14 * furthest)
        label(axis, title=title, grid="x")
    axes[-1].set_xlabel("tokens/s over plain decoding's", fontsize=8, color=INK)
    return figure


def phase_fractions(tables: Tables, width: float = WIDTH) -> Figure:
    """Where a step's time goes, by method; tables: of rows with phases."""
    heights = [0.5 + 0.28 * len(rows) for rows in tables.values()]
    figure, axes = new_figure(len(tables), 1, 0.7 + sum(heights), width, sharex=True, height_ratios=heights)
    for axis, title, rows in zip(axes, titles(tables), tables.values(), strict=True):
        left = [0.0] * len(rows)
        for phase, colour in zip(PHASES, SERIES, strict=True):
            parts = [100 * row.shares[phase] for row in rows]
            axis.barh([row.method for row in rows], parts, left=left, color=colour, height=0.62, label=phase)
            left = [a + b for a, b in zip(left, parts, strict=True)]
        axis.invert_yaxis()
        axis.set_xlim(0, 100)
        if title:
            axis.set_title(title, loc="left", fontsize=9, color=INK)
    axes[-1].set_xlabel("fraction of step time, %", fontsize=8, color=INK)
    legend(figure, axes)
    return figure


def position_lines(acceptance: dict[str, dict[str, list[float]]], width: float = WIDTH) -> Figure:
    """Fraction of the steps that accept a drafted token at position 1, 2, ..., one panel a setting and one line a method."""
    figure, axes = new_figure(1, len(acceptance), 3.4, width, sharey=True)
    for axis, title, methods in zip(axes, titles(acceptance), acceptance.values(), strict=True):
        for name, fractions in methods.items():
            style = {**line(name), "lw": 1.3, "marker": "o", "ms": 3}
            axis.plot(range(1, len(fractions) + 1), [100 * x for x in fractions], label=name, **style)
        axis.set_ylim(0, 100)
        axis.xaxis.get_major_locator().set_params(integer=True)
        label(axis, "position in the draft", title=title)
    axes[0].set_ylabel("steps that accept it, %", fontsize=8, color=INK)
    legend(figure, axes)
    return figure


def loss_curves(curves: Curves, width: float = WIDTH) -> Figure:
    """Training (and, where there are any, held-out) losses; one panel a training. A series of one value is a point."""
    shown = {name: losses for name, series in curves.items() if (losses := losses_of(series))}
    figure, axes = new_figure(1, len(shown), 2.6, width)
    for axis, title, losses in zip(axes, titles(shown), shown.values(), strict=True):
        for (key, points), colour in zip(sorted(losses.items()), SERIES, strict=False):
            depth = key.removeprefix("loss_depth_")  # a head's depths count from 0
            name = f"{ordinal(int(depth) + 1)} drafted token" if depth.isdigit() else key.replace("_", " ")
            mark = "o" if len(points) < 12 else None
            axis.plot(*zip(*points, strict=True), color=colour, lw=1.3, marker=mark, ms=3, label=name)
        label(axis, "step", title=title)
        if len(losses) > 1:
            axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel("loss", fontsize=8, color=INK)
    return figure


def losses_of(series: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """A training's losses among its series: a head's by depth, where it has them."""
    by_depth = {key: points for key, points in series.items() if "loss_depth" in key}
    return by_depth or {key: points for key, points in series.items() if key.endswith("loss") and points}


def action_histogram(
    chosen: dict[str, dict[str, dict[str, int]]], static: dict[str, dict[str, str]], width: float = WIDTH, max_trees: int = 14
) -> Figure:
    """Fraction of steps by tree, one panel for every setting and selector of `chosen`; the best static tree of the same (in
    `static`) is marked, and drawn even where it was never chosen."""
    panels = {f"{name}, {s}": (static.get(s, {}).get(name), own[name]) for s, own in chosen.items() for name in own}
    figure, axes = new_figure(len(panels), 1, 2.9 * len(panels), width)
    for axis, title, (best, counts) in zip(axes, titles(panels), panels.values(), strict=True):
        top = dict(sorted(counts.items(), key=lambda item: -item[1])[:max_trees])
        if best is not None:
            top.setdefault(best, counts.get(best, 0))
        total = sum(counts.values())
        rest = total - sum(top.values())
        colours = [SERIES[1] if tree == best else OURS for tree in top] + [OTHERS]
        bars = {tree: 100 * steps / total for tree, steps in top.items()} | ({"others": 100 * rest / total} if rest else {})
        axis.bar(list(bars), list(bars.values()), color=colours[: len(bars)])
        axis.tick_params(axis="x", rotation=70, labelsize=7)
        label(axis, y="fraction of steps, %", title=title, grid="y")
    axes[-1].set_xlabel("tree (K, L1, L2); a single path is (1, 0, L)", fontsize=8, color=INK)
    return figure


def selector_ratios(offline: dict, width: float = WIDTH) -> Figure:
    """Held-out tokens/s against the best static action of each setting, offline: one column a selector, one row a latency
    table."""
    kinds = {
        "selector": "selector",
        "static_domain": "best static by domain",
        "entropy_rule": "by draft entropy",
        "static_l1_0": "best static, L1 = 0",
    }
    tables = list(next(iter(offline.values())))
    panels = {f"{name}, {table}": offline[name][table] for table in tables for name in offline}
    height = 0.5 + 0.42 * (len(next(iter(panels.values()))["settings"]) + 1)
    figure, axes = new_figure(len(tables), len(offline), 0.8 + len(tables) * height, width, sharey=True, sharex=True)
    for axis, title, own in zip(axes, titles(panels), panels.values(), strict=True):
        groups = {**own["settings"], "all settings": own["all"]}
        for row, group in enumerate(groups.values()):
            low, high = sorted((group["split_half"][0], group["same_half"][0]))
            axis.barh(row, high - low, left=low, height=0.75, color=GRID, label="root by root, bounds" if not row else None)
        for offset, ((key, name), colour) in enumerate(zip(kinds.items(), SERIES, strict=True)):
            if key in own["all"]:
                at = [i + 0.18 * (offset - 1.5) for i in range(len(groups))]
                values = [group[key] for group in groups.values()]
                style = {"fmt": "o", "ms": 3.5, "capsize": 2, "lw": 1, "color": colour, "label": name}
                axis.errorbar([v[0] for v in values], at, xerr=whiskers(values), **style)
        axis.axvline(1, color=INK, lw=0.8, ls=":")
        axis.set_yticks(range(len(groups)), list(groups))
        label(axis, title=title, grid="x")
    axes[0].invert_yaxis()
    figure.supxlabel("held-out tokens/s relative to the best static tree (95 % interval)", fontsize=8, color=INK)
    legend(figure, sorted(axes, key=lambda axis: -len(axis.get_legend_handles_labels()[0])))
    return figure


def choice_by_entropy(offline: dict, width: float = WIDTH) -> Figure:
    """Mean depth and size of the trees that a selector chooses, by the draft's entropy at the root: one row for every selector
    and setting under which it chooses, one line a latency table. `offline` is cut to these by `chooses`."""
    panels = {
        f"{name}, {setting}: ": {table: own["settings"][setting]["by_entropy"] for table, own in tables.items()}
        for name, tables in offline.items()
        for setting in next(iter(tables.values()))["settings"]
    }
    figure, axes = new_figure(len(panels), 2, 0.4 + 2.4 * len(panels), width)
    for i, (title, tables) in enumerate(zip(titles(panels), panels.values(), strict=True)):
        for axis, key in zip(axes[2 * i :], ("depth", "nodes"), strict=False):
            for (table, points), colour in zip(tables.items(), SERIES, strict=False):
                axis.plot([p["entropy"] for p in points], [p[key] for p in points], color=colour, marker=".", label=table)
            label(axis, "draft's entropy, nats", title=f"{title}mean {key}")
            axis.set_ylim(bottom=0)
    legend(figure, axes[:1])
    return figure


def chooses(offline: dict) -> dict:
    """The part of the offline report in which a network chooses and its trees are known setting by setting: neither static
    exports nor reports of older versions."""
    found: dict[str, dict] = {}
    for name, tables in offline.items():
        for table, own in tables.items():
            settings = {key: value for key, value in own["settings"].items() if value["learned"] and "by_entropy" in value}
            if settings:
                found.setdefault(name, {})[table] = {**own, "settings": settings}
    return found


def acceptance_curves(rates: dict[str, dict[str, list[float]]], width: float = WIDTH) -> Figure:
    """Acceptance rate of every solver by depth on the draft's path, one panel a setting (Figure 1 of the NDE paper)."""
    figure, axes = new_figure(1, len(rates), 3.4, width, sharey=True)
    for axis, title, by_solver in zip(axes, titles(rates), rates.values(), strict=True):
        for name, values in by_solver.items():
            style = {"color": INK, "ls": "--"} if name == list(by_solver)[-1] else line(name)
            axis.plot(range(len(values)), values, marker=".", lw=1.3, label=name, **style)
        label(axis, "depth on the draft's path", title=title)
    axes[0].set_ylabel("acceptance rate, four draws", fontsize=8, color=INK)
    legend(figure, axes)
    return figure


def learning_curves(ablations: dict[str, dict]) -> Figure:
    """Held-out tokens/s by number of training roots and by super-trees a root, one line a latency table."""
    figure, axes = new_figure(1, 2, 3.2, sharey=True)
    full = ablations[FULL]
    for axis, group, name in zip(axes, ("prompts", "super-trees"), ("training roots", "super-trees a root"), strict=True):
        points = [r for r in ablations.values() if r["group"] == group] + ([full] if group == "prompts" else [])
        x = [r["training_roots"] if group == "prompts" else r["value"] for r in points]
        for table, colour in zip(full["tables"], SERIES, strict=False):
            y = [r["tables"][table]["selector"] for r in points]
            style = {"color": colour, "marker": "o", "ms": 3, "lw": 1.2, "capsize": 2, "label": table}
            axis.errorbar(x, [v[0] for v in y], yerr=whiskers(y), **style)
        axis.axhline(1, color=INK, lw=0.8, ls=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [f"{v:.0f}" for v in x])
        axis.minorticks_off()
        label(axis, name)
    axes[0].set_ylabel("held-out tokens/s against best static", fontsize=8, color=INK)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=len(names), fontsize=8, frameon=False)
    return figure


def tails(ablations: dict[str, dict]) -> Figure:
    """Quantiles over roots of throughput against the best static action, with and without the tail term."""
    shown = {name: ablations[name] for name in (FULL, NO_TAIL) if name in ablations}
    tables = list(ablations[FULL]["tables"])
    figure, axes = new_figure(1, len(tables), 2.8, sharey=True)
    quantiles = ["1 %", "5 %", "25 %", "50 %", "75 %"]
    for axis, table in zip(axes, tables, strict=True):
        for (name, result), colour in zip(shown.items(), SERIES, strict=False):
            axis.plot(quantiles, result["tables"][table]["worst_quantiles"], color=colour, marker="o", ms=3, label=name)
        axis.axhline(1, color=INK, lw=0.8, ls=":")
        label(axis, "quantile of held-out roots", title=table)
    axes[0].set_ylabel("tokens/s against best static", fontsize=8, color=INK)
    axes[0].legend(fontsize=8, frameon=False)
    return figure
