"""The selector's ablations as a table and two plots: pure functions of their results."""

from matplotlib.figure import Figure

from decoding.common.bootstrap import shown
from evaluation.markdown import markdown
from evaluation.plots import GRID, INK, SERIES, new_figure

FULL = "full"


def ablation_table(results: dict[str, dict]) -> str:
    """Markdown: held-out tokens/s against the best static options under every latency table, and the worst 5 % of the roots."""
    tables = list(results[FULL]["tables"])
    rows = []
    for name, result in results.items():
        cells = [name, str(result["training_roots"])]
        cells += [shown(own["selector"], 3) for own in result["tables"].values()]
        worst = [own["worst_5_percent"] for own in result["tables"].values()]
        cells.append(f"{sum(worst) / len(worst):.3f}")
        rows.append(cells)
    return markdown(["variant", "training roots", *tables, "worst 5 % of roots"], rows) + "\n"


def learning_curves(results: dict[str, dict]) -> Figure:
    """Held-out tokens/s by number of training roots and by super-trees a root, one line a latency table."""
    figure, axes = new_figure(1, 2, 3.2, sharey=True)
    full = results[FULL]
    for axis, (group, label) in zip(axes, (("prompts", "training roots"), ("super-trees", "super-trees a root")), strict=True):
        points = [r for r in results.values() if r["group"] == group] + ([full] if group == "prompts" else [])
        for table, colour in zip(full["tables"], SERIES, strict=False):
            x = [r["training_roots"] if group == "prompts" else r["value"] for r in points]
            y = [r["tables"][table]["selector"] for r in points]
            errors = [[v[0] - v[1] for v in y], [v[2] - v[0] for v in y]]
            axis.errorbar(x, [v[0] for v in y], yerr=errors, color=colour, marker="o", ms=3, lw=1.2, capsize=2, label=table)
        axis.axhline(1, color=INK, lw=0.8, ls=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [f"{v:.0f}" for v in x])
        axis.minorticks_off()
        axis.set_xlabel(label, fontsize=8)
        axis.grid(color=GRID)
    axes[0].set_ylabel("held-out tokens/s against best static", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def tails(results: dict[str, dict]) -> Figure:
    """Quantiles over roots of throughput against the best static option, with and without the tail term."""
    shown = {name: results[name] for name in (FULL, "no tail term") if name in results}
    tables = list(results[FULL]["tables"])
    figure, axes = new_figure(1, len(tables), 2.8, sharey=True)
    quantiles = ["1 %", "5 %", "25 %", "50 %", "75 %"]
    for axis, table in zip(axes, tables, strict=True):
        for (name, result), colour in zip(shown.items(), SERIES, strict=False):
            axis.plot(quantiles, result["tables"][table]["worst_quantiles"], color=colour, marker="o", ms=3, label=name)
        axis.axhline(1, color=INK, lw=0.8, ls=":")
        axis.set_title(table, loc="left", fontsize=9, color=INK)
        axis.set_xlabel("quantile of held-out roots", fontsize=8)
        axis.grid(color=GRID)
    axes[0].set_ylabel("tokens/s against best static", fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    return figure
