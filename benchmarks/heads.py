"""Heads of three wirings, each trained with three losses for equal time on one target.

`python -m benchmarks.heads --run checkpoints/default`, after stage pair of the shipped pair, reads
the text of the frozen list. Every head begins at random and takes as many optimiser steps as fit
into `--seconds` of CPU time. Overlap and agreement on held-out text are recorded on the way, so
that it shows whether a training was flat at its end. Then all heads decode the same prompts.

An interrupted command goes on where it stopped. Two processes share the trainings with
`--train "EAGLE, HASS" "EAGLE, TALF"` and so on; the command without it trains what is left and
decodes.
"""

import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.papers.shared import LENGTH, Bench, options_of
from benchmarks.timing import RESULTS, report
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import spread
from nde_talf.data.text.recipe import prepared
from nde_talf.data.text.sources import documents, read_frozen
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.draft_training.evaluate import SAMPLED, held_out_report
from nde_talf.draft_training.export import save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.precision import cast_once
from nde_talf.draft_training.settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import HeadModule, build_head, fit_head

THREE: dict[str, Any] = {"features": "three", "chain_fraction": 0.0}
WIRINGS: dict[str, dict[str, Any]] = {
    "EAGLE": {},
    "EAGLE-3": THREE,
    "EAGLE 3.1": {**THREE, "norms": ["fc_norm", "norm_output"]},
}
"""EAGLE-1, EAGLE-3 and EAGLE 3.1, the last two with trees from the first step."""
LOSSES = {"EAGLE": EagleLoss(), "HASS": HassLoss(detach_features=False), "TALF": TalfLoss(k=4)}
"""As the SALF & TALF paper prints them."""
FIRST = {f"{wiring}, TALF, depth 0 first": wiring for wiring in ("EAGLE-3", "EAGLE 3.1")}
"""More heads, six tenths of whose steps train depth 0 alone, as the preset eagle3.1 has it."""
TREES = {
    "beam, NSS": (Beam, "nss"),
    "(4, 1, 3), SpecInfer": (lambda: Delayed(Action(4, 1, 3)), "specinfer"),
}
TEXT_ROWS, BATCH = 12_288, 4
TIMED = 5
"""Steps of each head, in turn, whose median says what one costs."""
LOOKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 2 / 3, 5 / 6, 1.0)
"""Fractions of a training after which held-out text is looked at."""


def configurations(steps: dict[str, int] | None = None) -> dict[str, HeadConfig]:
    """Return the settings of every head, by "wiring, loss"."""
    made = {}
    for wiring, own in WIRINGS.items():
        for name, loss in LOSSES.items():
            if own and loss.regression:  # such a head has no feature to regress to
                loss = replace(loss, regression=0.0)
            title = f"{wiring}, {name}"
            count = steps[title] if steps else HeadConfig.steps
            made[title] = HeadConfig(loss=loss, steps=count, batch=BATCH, warm_up=20, **own)
    return made


def step_seconds(target: CausalModel, rows: TokenRows) -> dict[str, float]:
    """Measure the median CPU seconds of an optimiser step, by head, with and without depth."""
    modules = {n: HeadModule(build_head(target, c), c) for n, c in configurations().items()}
    optimizers = {name: module.configure_optimizers() for name, module in modules.items()}
    phases = {"chain": 0, "trees": HeadConfig.steps - 1}
    times: dict[tuple[str, str], list[float]] = {(n, p): [] for n in modules for p in phases}
    precision = next(iter(modules.values())).trained_in
    half = precision.startswith("bf16")
    with cast_once(target.module, precision):
        for _ in range(TIMED + 1):
            for (name, phase), seconds in times.items():
                started = time.process_time()
                with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                    loss = modules[name].loss(rows[torch.arange(BATCH)], phases[phase])[0]
                loss.backward()
                for optimizer in optimizers[name]:
                    optimizer.step()
                    optimizer.zero_grad()
                seconds.append(time.process_time() - started)
    median = {key: statistics.median(each[1:]) for key, each in times.items()}
    means = {}
    for name, config in configurations().items():
        chain = config.chain_fraction
        means[name] = chain * median[name, "chain"] + (1 - chain) * median[name, "trees"]
    return means


class Looks(pl.Callback):
    """Writes the held-out report of a head while it trains, a line for each of `LOOKS`."""

    def __init__(self, file: Path, rows: TokenRows, steps: int) -> None:
        self.file, self.rows = file, rows
        self.at = {round(steps * fraction) for fraction in LOOKS}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        """Look, where that is due."""
        if trainer.global_step in self.at:
            with trainer.precision_plugin.forward_context():
                found = held_out_report(module.head, module.head.target, self.rows)
            with self.file.open("a") as out:
                out.write(json.dumps({"step": trainer.global_step, **found}) + "\n")


def looks(folder: Path) -> list[dict[str, Any]]:
    """Read the reports of a training, the first of each step, in the order of the steps."""
    lines = [json.loads(line) for line in (folder / "looks.jsonl").read_text().splitlines()]
    return sorted(
        {line["step"]: line for line in reversed(lines)}.values(), key=lambda x: x["step"]
    )


def ended(folder: Path) -> tuple[list[float], float]:
    """The overlap by depth at the end of a training, and what its mean gained in the last third."""
    seen = looks(folder)
    steps = seen[-1]["step"]
    before = next(x["overlap"] for x in seen if x["step"] == round(steps * LOOKS[-3]))
    last = seen[-1]["overlap"]
    return last, (sum(last) - sum(before)) / len(last)


def picture(curves: dict[str, list[tuple[float, float]]]) -> None:
    """Draw the predicted accepted length over CPU seconds, a panel a wiring."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(WIRINGS), sharey=True)
    for panel, wiring in zip(panels, WIRINGS, strict=True):
        for name in (each for each in curves if each.startswith(f"{wiring}, ")):
            panel.plot(*zip(*curves[name], strict=True), marker=".", label=name.split(", ", 1)[1])
        panel.set(title=f"{wiring} wiring", xscale="log", xlabel="CPU seconds of training")
    panels[0].set_ylabel("1 + sums of products of overlap")
    for panel in panels:
        panel.legend(fontsize="small")
        panel.set_xticks([30, 100, 300], labels=["30", "100", "300"])
        panel.tick_params(axis="x", which="minor", labelbottom=False)
    figure.savefig(RESULTS / "heads.png", dpi=110)


def length(overlap: list[float]) -> float:
    """Predict the tokens a pass of a path of as many draws: 1 + the sum of products."""
    return 1 + float(torch.tensor(overlap).cumprod(0).sum())


def main() -> None:
    parser = options_of(__doc__, 48)
    parser.add_argument("--seconds", type=float, default=420, help="CPU time of each training")
    parser.add_argument("--text", type=Path, help="folder of the text; default <out>/text")
    names = [*configurations(), *FIRST]
    parser.add_argument("--train", nargs="+", choices=names, help="train these and stop")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    bench = Bench(options)
    target, folder = bench.models[0], bench.folder / f"heads-{options.seconds:g}"
    folder.mkdir(exist_ok=True)
    text = prepared(options.text or bench.folder / "text", documents(read_frozen()))
    room = text.train.shape[1] - SAMPLED
    rows = TokenRows.plain(text.train[-TEXT_ROWS:, :room].long())
    held_out = torch.cat([spread(each, 8) for each in text.held_out.values()])
    some = TokenRows.plain(held_out[:, :room].long())
    costs = folder / "step_seconds.json"
    if not costs.exists():
        write_json(costs, step_seconds(target, rows))
    seconds = json.loads(costs.read_text())
    every = configurations({name: round(options.seconds / own) for name, own in seconds.items()})
    for name, wiring in FIRST.items():
        seconds[name] = 0.6 * seconds[f"{wiring}, EAGLE"] + 0.4 * seconds[f"{wiring}, TALF"]
        steps = round(options.seconds / seconds[name])
        every[name] = replace(every[f"{wiring}, TALF"], steps=steps, chain_fraction=0.6)
    heads = {}
    for name, config in every.items():
        where = folder / name
        if name not in (options.train or every):
            continue
        if not (where / "export").exists():
            where.mkdir(exist_ok=True)
            print(f"{name}: {config.steps} steps of {BATCH} rows", flush=True)
            see = Looks(where / "looks.jsonl", some, config.steps)
            head = fit_head(target, rows, config, where / "training", callbacks=[see])
            save_head(head, where / "export")
        heads[name] = where
    if options.train:
        return
    methods = {
        f"{name} / {tree}": (make(), rule, EagleDrafter.from_pretrained(where / "export", target))
        for name, where in heads.items()
        for tree, (make, rule) in TREES.items()
    }
    decoded = {
        t: bench.decode(f"heads-{options.seconds:g}-t{t:g}", SamplingSetting(t), methods)
        for t in options.temperatures
    }
    table, curves = [], {}
    for name, where in heads.items():
        seen, (last, gain) = looks(where), ended(where)
        curves[name] = [(x["step"] * seconds[name], length(x["overlap"])) for x in seen]
        taus = (
            decoded[t].figure(LENGTH, f"{name} / {tree}")
            for t in options.temperatures
            for tree in TREES
        )
        by_depth = " ".join(f"{x:.3f}" for x in last)
        table.append([name, every[name].steps, by_depth, f"{gain:+.4f}", *taus])
    picture(curves)
    columns = [f"τ, T = {t:g}, {tree}" for t in options.temperatures for tree in TREES]
    told = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    notes = [f"CPU seconds of a step, interleaved medians: {told}."]
    head_columns = ["wiring, loss", "steps", "overlap after 0 to 4 drafts", "gain of last third"]
    report("heads", [*head_columns, *columns], table, notes)


if __name__ == "__main__":
    main()
