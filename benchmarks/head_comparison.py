"""Draft heads trained with different losses, compared: the shapes of Tables 2 and 3 and Figure 2b
of the SALF & TALF paper.

Pure functions of records and of per-root outcomes. The mean generation length of a method is its
tokens a target pass, the bonus token included: what that paper calls τ and this project block
efficiency.
"""

import numpy as np
from matplotlib.figure import Figure

from nde_talf.decoding.common.bootstrap import ratio_of_totals, shown
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.plots import SERIES, styled
from nde_talf.evaluation.table import markdown


def generation_length(records: list[Record]) -> list[float]:
    """[tokens a target pass, low, high]: 95 % bootstrap over the prompts of one method's records."""
    return ratio_of_totals(np.array([[r.tokens, r.steps] for r in records if r.steps], dtype=float))


def gain(ours: list[Record], theirs: list[Record]) -> list[float]:
    """[ratio, low, high] of our generation length to theirs on the prompts of both, which are
    resampled together.
    """
    other = {r.prompt: r for r in theirs if r.steps}
    pairs = [(r, other[r.prompt]) for r in ours if r.steps and r.prompt in other]
    return ratio_of_totals(
        np.array([[a.tokens, a.steps, b.tokens, b.steps] for a, b in pairs], dtype=float)
    )


def comparison_table(
    records: list[Record],
    heads: dict[str, str],
    trees: list[str],
    references: list[str],
    settings: dict[str, str],
) -> str:
    """Markdown: generation length by tree and head, and what each gains over the heads
    `references`. heads: name -> title; records' methods are "name / tree", and a head without
    records of a tree has no line there; settings: as records have them -> title.
    """
    columns = ["tree", "loss"]
    for title in settings.values():
        columns += [f"τ, {title}", *(f"over {heads[reference]}" for reference in references)]
    rows = []
    for tree in trees:
        for name, title in heads.items():
            if not any(record.method == f"{name} / {tree}" for record in records):
                continue
            cells = [tree, title]
            for setting in settings:
                here = {r.method: [] for r in records}
                for record in records:
                    if record.setting == setting:
                        here[record.method].append(record)
                own = here[f"{name} / {tree}"]
                cells.append(shown(generation_length(own)))
                for reference in references:
                    value, low, high = (
                        100 * (x - 1) for x in gain(own, here[f"{reference} / {tree}"])
                    )
                    cells.append(
                        "" if name == reference else f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"
                    )
            rows.append(cells)
    return markdown(columns, rows) + "\n"


def rank_table(by_rank: dict[str, dict[str, list[float]]]) -> str:
    """Markdown of `rank_figure`'s numbers."""
    ranks = range(1, 1 + len(next(iter(by_rank.values()))["accuracy"]))
    columns = ["loss", *(f"accuracy, rank {n}" for n in ranks), *(f"ECE, rank {n}" for n in ranks)]
    rows = (
        [title, *(f"{x:.3f}" for x in (*own["accuracy"], *own["ece"]))]
        for title, own in by_rank.items()
    )
    return markdown(columns, rows) + "\n"


@styled
def rank_figure(by_rank: dict[str, dict[str, list[float]]]) -> Figure:
    """Figure 2b: top-1 accuracy and calibration error after a token that is n-th in the draft's own
    distribution. by_rank: title -> accuracy and ece, lists over n = 1, 2, ...
    """
    figure = Figure(figsize=(9.0, 3.0))
    axes = figure.subplots(1, 2)
    for axis, key, title in zip(
        axes, ("accuracy", "ece"), ("top-1 accuracy", "expected calibration error"), strict=True
    ):
        for i, (name, own) in enumerate(by_rank.items()):
            ranks = range(1, len(own[key]) + 1)
            style = {"color": SERIES[i % len(SERIES)], "ls": "-" if i < len(SERIES) else "--"}
            axis.plot(ranks, own[key], marker="o", ms=3, lw=1.2, label=name, **style)
        axis.set_xticks(list(ranks))
        axis.set(xlabel="rank of the token conditioned on", ylabel=title)
    axes[0].legend()
    return figure
