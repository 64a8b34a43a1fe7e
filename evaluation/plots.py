"""The report's figures: pure functions from results to matplotlib figures, without global state.

Each takes one setting or several; the page shows one panel a setting at the width of a telephone, PNGs show them together.
"""

import re
from io import BytesIO

from matplotlib import rc_context
from matplotlib.figure import Figure

from decoding.loop import PHASES
from evaluation.colours import line
from evaluation.figures import ordinal
from evaluation.protocol import BASELINE, CONTROL
from evaluation.table import Row, control_of

OURS, OTHERS, PLAIN, INK, GRID = "#0072b2", "#9aa5b1", "#cbd2d9", "#1f2933", "#e4e7eb"
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe-Ito: told apart without red and green
WIDTH = 9.0  # inches, at 100 dots each
PANEL = 4.4  # inches: of one panel on the page

# Colours of the page that stand in for those of a picture, so that it follows the page into dark mode.
THEMED = {INK: "ink", "#000000": "ink", GRID: "line", OURS: "blue", OTHERS: "grey", PLAIN: "pale", "#009e73": "green"}

Tables = dict[str, list[Row]]
Curves = dict[str, dict[str, list[tuple[int, float]]]]


def new_figure(rows: int, columns: int, height: float, width: float = WIDTH, **options) -> tuple[Figure, list]:
    """A figure of `width` x `height` inches in the report's style, and its axes in reading order."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.tick_params(colors=INK, labelsize=8)
        axis.set_axisbelow(True)
    return figure, axes


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


def legend(figure: Figure, handles: list, labels: list[str]) -> None:
    """Above the axes, in as many columns as the width has room for."""
    room = max(1, int(figure.get_size_inches()[0] / (0.5 + 0.075 * max(map(len, labels), default=1))))
    figure.legend(handles, labels, loc="outside upper left", ncols=min(room, len(labels)), fontsize=8, frameon=False)


def speed_bars(tables: Tables, learned: dict[str, set[str]], width: float = WIDTH) -> Figure:
    """Speed-up over autoregressive decoding by method, one panel a sampling setting. Methods of `learned` (by setting) have a
    colour of their own; the band is the A/A control's interval, which no difference inside it leaves."""
    heights = [0.5 + 0.28 * len(rows) for rows in tables.values()]
    figure, axes = new_figure(len(tables), 1, 0.4 + sum(heights), width, sharex=True, height_ratios=heights)
    furthest = max((row.speedup[2] for rows in tables.values() for row in rows), default=1.0)
    for axis, (setting, rows) in zip(axes, tables.items(), strict=True):
        names = [row.method for row in rows]
        values = [row.speedup[0] for row in rows]
        errors = [
            [max(0.0, r.speedup[0] - r.speedup[1]) for r in rows],
            [max(0.0, r.speedup[2] - r.speedup[0]) for r in rows],
        ]
        ours = learned.get(setting, set())
        colours = [OURS if n in ours else PLAIN if n in (BASELINE, CONTROL) else OTHERS for n in names]
        if control := control_of(rows):
            axis.axvspan(control[1], control[2], color=SERIES[1], alpha=0.25, lw=0)
        axis.barh(names, values, xerr=errors, color=colours, height=0.62, error_kw={"ecolor": INK, "capsize": 2, "lw": 1})
        for i, row in enumerate(rows):
            axis.text(row.speedup[2] + 0.015 * furthest, i, f"{row.speedup[0]:.2f}×", va="center", fontsize=8, color=INK)
        axis.axvline(1, color=INK, lw=0.8, ls=":")
        axis.invert_yaxis()
        axis.set_xlim(0, 1.14 * furthest)
        axis.grid(axis="x", color=GRID)
        if len(tables) > 1:
            axis.set_title(setting, loc="left", fontsize=10, color=INK)
    axes[-1].set_xlabel("tokens/s over plain decoding's", fontsize=8, color=INK)
    return figure


def phase_shares(tables: Tables, width: float = WIDTH) -> Figure:
    """Where a step's time goes, by method."""
    shown = {setting: [row for row in rows if row.shares] for setting, rows in tables.items()}
    heights = [0.5 + 0.28 * len(rows) for rows in shown.values()]
    figure, axes = new_figure(len(shown), 1, 0.7 + sum(heights), width, sharex=True, height_ratios=heights)
    for axis, (setting, rows) in zip(axes, shown.items(), strict=True):
        left = [0.0] * len(rows)
        for phase, colour in zip(PHASES, SERIES, strict=True):
            shares = [100 * row.shares[phase] for row in rows]
            axis.barh([row.method for row in rows], shares, left=left, color=colour, height=0.62, label=phase)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axis.invert_yaxis()
        axis.set_xlim(0, 100)
        if len(shown) > 1:
            axis.set_title(setting, loc="left", fontsize=10, color=INK)
    axes[-1].set_xlabel("share of step time, %", fontsize=8, color=INK)
    legend(figure, *axes[0].get_legend_handles_labels())
    return figure


def position_lines(acceptance: dict[str, dict[str, list[float]]], width: float = WIDTH) -> Figure:
    """Share of the steps that accept a drafted token at position 1, 2, ..., one panel a setting and one line a method."""
    figure, axes = new_figure(1, len(acceptance), 3.4, width, sharey=True)
    for axis, (setting, methods) in zip(axes, acceptance.items(), strict=True):
        for name, shares in methods.items():
            style = {**line(name), "lw": 1.3, "marker": "o", "ms": 3}
            axis.plot(range(1, len(shares) + 1), [100 * x for x in shares], label=name, **style)
        axis.set_ylim(0, 100)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel("position in the draft", fontsize=8, color=INK)
        axis.grid(color=GRID)
        if len(acceptance) > 1:
            axis.set_title(setting, loc="left", fontsize=10, color=INK)
    axes[0].set_ylabel("steps that accept it, %", fontsize=8, color=INK)
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    legend(figure, list(found.values()), list(found))
    return figure


def loss_curves(curves: Curves, width: float = WIDTH) -> Figure:
    """Training (and, where there are any, held-out) losses; one panel a training. A series of one value is a point."""
    shown = {name: losses for name, series in curves.items() if (losses := losses_of(series))}
    figure, axes = new_figure(1, len(shown), 2.6, width)
    for axis, (name, losses) in zip(axes, shown.items(), strict=True):
        for (key, points), colour in zip(sorted(losses.items()), SERIES, strict=False):
            mark = "o" if len(points) < 12 else None
            axis.plot(*zip(*points, strict=True), color=colour, lw=1.3, marker=mark, ms=3, label=_of_loss(key))
        if len(shown) > 1:
            axis.set_title(name, loc="left", fontsize=10, color=INK)
        axis.set_xlabel("step", fontsize=8, color=INK)
        axis.grid(color=GRID)
        if len(losses) > 1:
            axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel("loss", fontsize=8, color=INK)
    return figure


def _of_loss(key: str) -> str:
    """A series' name in the legend; a head's depths count from 0."""
    depth = key.removeprefix("loss_depth_")
    return f"{ordinal(int(depth) + 1)} drafted token" if depth.isdigit() else key.replace("_", " ")


def losses_of(series: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """A training's losses among its series: by depth where a head has them."""
    by_depth = {key: points for key, points in series.items() if "loss_depth" in key}  # a head's, a node
    return by_depth or {key: points for key, points in series.items() if key.endswith("loss") and points}


def action_histogram(
    chosen: dict[str, dict[str, dict[str, int]]], static: dict[str, dict[str, str]], most: int = 14, width: float = WIDTH
) -> Figure:
    """Share of steps by tree, one panel for every setting and selector of `chosen`; the best static tree of the same (in
    `static`) is marked, and drawn even where it was never chosen."""
    panels = [(setting, name, counts) for setting, own in chosen.items() for name, counts in own.items()]
    figure, axes = new_figure(len(panels), 1, 2.9 * len(panels), width)
    for axis, (setting, name, counts) in zip(axes, panels, strict=True):
        best = static.get(setting, {}).get(name)
        top = dict(sorted(counts.items(), key=lambda item: -item[1])[:most])
        if best is not None:
            top.setdefault(best, counts.get(best, 0))
        total = sum(counts.values())
        rest = total - sum(top.values())
        colours = [SERIES[1] if tree == best else OURS for tree in top]
        bars = {tree: 100 * steps / total for tree, steps in top.items()} | ({"others": 100 * rest / total} if rest else {})
        axis.bar(list(bars), list(bars.values()), color=colours + [OTHERS] * (len(bars) - len(colours)))
        axis.set_title(f"{name}, {setting}" if len(panels) > 1 else "", loc="left", fontsize=9, color=INK)
        axis.tick_params(axis="x", rotation=70, labelsize=7)
        axis.grid(axis="y", color=GRID)
        axis.set_ylabel("share of steps, %", fontsize=8, color=INK)
    axes[-1].set_xlabel("tree (K, L1, L2); a single path is (1, 0, L)", fontsize=8, color=INK)
    return figure


def selector_ratios(offline: dict, width: float = WIDTH) -> Figure:
    """Held-out tokens/s against the best static option of each setting, offline: one column a selector, one row a latency
    table."""
    kinds = {
        "selector": "selector",
        "static_domain": "best static by domain",
        "entropy_rule": "by draft entropy",
        "static_l1_0": "best static, L1 = 0",
    }
    tables = list(next(iter(offline.values())))
    lines = len(next(iter(offline.values()))[tables[0]]["settings"]) + 1
    figure, axes = new_figure(
        len(tables), len(offline), 0.8 + len(tables) * (0.5 + 0.42 * lines), width, sharey=True, sharex=True
    )
    for axis, (table, name) in zip(axes, [(t, n) for t in tables for n in offline], strict=True):
        own = offline[name][table]
        groups = {**own["settings"], "all settings": own["all"]}
        for row, group in enumerate(groups.values()):
            low, high = sorted((group["split_half"][0], group["same_half"][0]))
            axis.barh(row, high - low, left=low, height=0.75, color=GRID, label="root by root, bounds" if not row else None)
        for offset, ((key, label), colour) in enumerate(zip(kinds.items(), SERIES, strict=True)):
            if key in own["all"]:
                at = [i + 0.18 * (offset - 1.5) for i in range(len(groups))]
                values = [group[key] for group in groups.values()]
                errors = [[max(0.0, v[0] - v[1]) for v in values], [max(0.0, v[2] - v[0]) for v in values]]
                style = {"fmt": "o", "ms": 3.5, "capsize": 2, "lw": 1, "color": colour, "label": label}
                axis.errorbar([v[0] for v in values], at, xerr=errors, **style)
        axis.axvline(1, color=INK, lw=0.8, ls=":")
        axis.set_yticks(range(len(groups)), list(groups))
        axis.grid(axis="x", color=GRID)
        if len(axes) > 1:
            axis.set_title(f"{name}, {table}", loc="left", fontsize=9, color=INK)
    axes[0].invert_yaxis()
    figure.supxlabel("held-out tokens/s relative to the best static tree (95 % interval)", fontsize=8, color=INK)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda found: len(found[0]))
    legend(figure, handles, labels)
    return figure


def choice_by_entropy(offline: dict, width: float = WIDTH) -> Figure:
    """Mean depth and size of the trees that a selector chooses, by the draft's entropy at the root: one row for every selector
    and setting under which it chooses, one line a latency table. `offline` is cut to these by `chooses`."""
    panels = [
        (name, setting, {table: own["settings"][setting]["by_entropy"] for table, own in tables.items()})
        for name, tables in offline.items()
        for setting in next(iter(tables.values()))["settings"]
    ]
    figure, axes = new_figure(len(panels), 2, 0.4 + 2.4 * len(panels), width)
    for (name, setting, tables), pair in zip(panels, zip(axes[::2], axes[1::2], strict=True), strict=True):
        for axis, key in zip(pair, ("depth", "nodes"), strict=True):
            for (table, points), colour in zip(tables.items(), SERIES, strict=False):
                axis.plot([p["entropy"] for p in points], [p[key] for p in points], color=colour, marker=".", label=table)
            axis.set_title(f"{f'{name}, {setting}: ' if len(panels) > 1 else ''}mean {key}", loc="left", fontsize=9, color=INK)
            axis.set_xlabel("draft's entropy, nats", fontsize=8, color=INK)
            axis.set_ylim(bottom=0)
            axis.grid(color=GRID)
    legend(figure, *axes[0].get_legend_handles_labels())
    return figure


def chooses(offline: dict) -> dict:
    """The part of the offline report in which a network chooses and its trees were told setting by setting: neither static
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
    for axis, (setting, by_solver) in zip(axes, rates.items(), strict=True):
        for name, values in by_solver.items():
            style = {"color": INK, "ls": "--"} if name == list(by_solver)[-1] else line(name)
            axis.plot(range(len(values)), values, marker=".", lw=1.3, label=name, **style)
        if len(rates) > 1:
            axis.set_title(setting, loc="left", fontsize=10, color=INK)
        axis.set_xlabel("depth on the draft's path", fontsize=8, color=INK)
        axis.grid(color=GRID)
    axes[0].set_ylabel("acceptance rate, four draws", fontsize=8, color=INK)
    legend(figure, *axes[0].get_legend_handles_labels())
    return figure
