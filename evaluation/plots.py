"""The report's figures: pure functions from results to matplotlib figures, without global state."""

from matplotlib.figure import Figure

from decoding.loop import PHASES
from evaluation.table import Row

OURS, OTHERS, INK, GRID = "#0072b2", "#9aa5b1", "#1f2933", "#e4e7eb"
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe-Ito: told apart without red and green
WIDTH = 9.0  # inches, at 100 dots each

Tables = dict[str, list[Row]]
Curves = dict[str, dict[str, list[tuple[int, float]]]]


def new_figure(rows: int, columns: int, height: float, **options) -> tuple[Figure, list]:
    """A figure of `height` inches in the report's style, and its axes in reading order."""
    figure = Figure(figsize=(WIDTH, height), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, labelsize=8)
        axis.set_axisbelow(True)
    return figure, axes


def _ours(method: str) -> bool:
    return "NDE" in method or "TALF" in method


def speed_bars(tables: Tables) -> Figure:
    """Speedup over autoregressive decoding by method, one panel a sampling setting."""
    figure, axes = new_figure(len(tables), 1, 0.6 + sum(0.6 + 0.32 * len(rows) for rows in tables.values()), sharex=True)
    for axis, (setting, rows) in zip(axes, tables.items(), strict=True):
        names = [row.method for row in rows]
        values = [row.speedup[0] for row in rows]
        errors = [
            [max(0.0, r.speedup[0] - r.speedup[1]) for r in rows],
            [max(0.0, r.speedup[2] - r.speedup[0]) for r in rows],
        ]
        colours = [OURS if _ours(name) else OTHERS for name in names]
        axis.barh(names, values, xerr=errors, color=colours, height=0.65, error_kw={"ecolor": INK, "capsize": 2, "lw": 1})
        for i, row in enumerate(rows):
            axis.text(row.speedup[2] + 0.03, i, f"{row.speedup[0]:.2f}×", va="center", fontsize=8, color=INK)
        axis.axvline(1, color=INK, lw=0.8, ls=":")
        axis.invert_yaxis()
        axis.grid(axis="x", color=GRID)
        axis.set_title(setting, loc="left", fontsize=10, color=INK)
    axes[-1].set_xlabel("speedup over autoregressive decoding (median over prompts, 95 % interval)", fontsize=8)
    return figure


def phase_shares(tables: Tables) -> Figure:
    """Where a step's time goes, by method."""
    shown = {setting: [row for row in rows if row.shares] for setting, rows in tables.items()}
    figure, axes = new_figure(len(shown), 1, 0.9 + sum(0.6 + 0.28 * len(rows) for rows in shown.values()), sharex=True)
    for axis, (setting, rows) in zip(axes, shown.items(), strict=True):
        left = [0.0] * len(rows)
        for phase, colour in zip(PHASES, SERIES, strict=True):
            shares = [100 * row.shares[phase] for row in rows]
            axis.barh([row.method for row in rows], shares, left=left, color=colour, height=0.65, label=phase)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axis.invert_yaxis()
        axis.set_xlim(0, 100)
        axis.set_title(setting, loc="left", fontsize=10, color=INK)
    axes[-1].set_xlabel("share of step time, %", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(PHASES), fontsize=8, frameon=False)
    return figure


def loss_curves(curves: Curves) -> Figure:
    """Training (and, where there are any, held-out) losses; one panel a training."""
    figure, axes = new_figure(1, len(curves), 2.6)
    for axis, (name, series) in zip(axes, curves.items(), strict=True):
        by_depth = {key: points for key, points in series.items() if "loss_depth" in key}  # a head's, a node
        losses = by_depth or {key: points for key, points in series.items() if key.endswith("loss")}
        for (key, points), colour in zip(sorted(losses.items()), SERIES, strict=False):
            axis.plot(*zip(*points, strict=True), color=colour, lw=1.3, label=key.replace("_", " "))
        axis.set_title(name, loc="left", fontsize=10, color=INK)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(color=GRID)
        if len(losses) > 1:
            axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel("loss", fontsize=8)
    return figure


def action_histogram(chosen: dict[str, dict[str, int]], static: dict[str, tuple], most: int = 14) -> Figure:
    """Share of steps by the selector's (K, L1, L2), one panel a setting; the best static tree is marked."""
    figure, axes = new_figure(1, len(chosen), 3.2, sharey=True)
    for axis, (setting, counts) in zip(axes, chosen.items(), strict=True):
        top = sorted(counts.items(), key=lambda item: -item[1])[:most]
        total = sum(counts.values())
        baseline = str(tuple(static[setting])) if setting in static else None
        colours = [SERIES[1] if action == baseline else OURS for action, _ in top]
        axis.bar([action for action, _ in top], [100 * steps / total for _, steps in top], color=colours)
        axis.set_title(f"{setting}   (best static: {baseline})", loc="left", fontsize=9, color=INK)
        axis.tick_params(axis="x", rotation=70, labelsize=7)
        axis.grid(axis="y", color=GRID)
        axis.set_xlabel("tree (K, L1, L2); a single path is (1, 0, L)", fontsize=8)
    axes[0].set_ylabel("share of steps, %", fontsize=8)
    return figure


def selector_ratios(offline: dict) -> Figure:
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
    figure, axes = new_figure(len(tables), len(offline), 0.8 + len(tables) * (0.5 + 0.42 * lines), sharey=True, sharex=True)
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
        axis.set_title(f"{name}, {table}", loc="left", fontsize=9, color=INK)
    axes[0].invert_yaxis()
    figure.supxlabel("held-out tokens/s relative to the best static tree (95 % interval over prompts)", fontsize=8)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda found: len(found[0]))
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def choice_by_entropy(offline: dict) -> Figure:
    """Mean depth and size of the chosen trees by the draft's entropy at the root; one panel a selector, one line a latency
    table."""
    figure, axes = new_figure(1, 2 * len(offline), 2.8)
    for at, (name, tables) in enumerate(offline.items()):
        for axis, key in zip(axes[2 * at : 2 * at + 2], ("depth", "nodes"), strict=True):
            for (table, own), colour in zip(tables.items(), SERIES, strict=False):
                points = own["by_entropy"]
                axis.plot([p["entropy"] for p in points], [p[key] for p in points], color=colour, marker=".", label=table)
            axis.set_title(f"{name}: mean {key}", loc="left", fontsize=9, color=INK)
            axis.set_xlabel("draft's entropy at the root, nats", fontsize=8)
            axis.set_ylim(bottom=0)
            axis.grid(color=GRID)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def acceptance_curves(rates: dict[str, dict[str, list[float]]]) -> Figure:
    """Acceptance rate of every solver by depth on the draft's path, one panel a setting (Figure 1, paper 000)."""
    figure, axes = new_figure(1, len(rates), 3.2, sharey=True)
    for axis, (setting, by_solver) in zip(axes, rates.items(), strict=True):
        colours = iter((*SERIES, "#56b4e9"))
        for name, values in by_solver.items():
            style = {"color": INK, "ls": "--"} if name == list(by_solver)[-1] else {"color": next(colours)}
            axis.plot(range(len(values)), values, marker=".", lw=1.3, label=name, **style)
        axis.set_title(setting, loc="left", fontsize=10, color=INK)
        axis.set_xlabel("depth on the draft's path", fontsize=8)
        axis.grid(color=GRID)
    axes[0].set_ylabel("acceptance rate, four draws", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    return figure
