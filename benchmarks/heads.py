"""Heads trained with the losses of EAGLE, HASS and TALF from one warm start, on the same text.

`python -m benchmarks.heads --run checkpoints/default`, after stage pair. Heads are trained for
equal optimiser steps, and again for equal CPU time of one thread; an interrupted command goes on
where it stopped. The table is mean generation length on held-out prompts by loss and tree (Tables 2
and 3 of the SALF & TALF paper), with 95 % intervals over prompts.
"""

import statistics
import time
from dataclasses import replace

import torch

from benchmarks.papers.shared import LENGTH, Bench, options_of
from benchmarks.papers.talf import LOSSES, fit_once
from benchmarks.timing import report
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import spread
from nde_talf.decoding.actions import Action
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.settings import EagleLoss, HeadConfig
from nde_talf.draft_training.train_head import HeadModule, build_head
from nde_talf.draft_training.trainer import eager_attention

SLOWEST = "TALF"
TREES = {
    "beam": (Beam, "nss"),
    "SALF": (Salf, "nss"),
    "(3, 0, 4), SpecInfer": (lambda: Delayed(Action(3, 0, 4)), "specinfer"),
}
TIMED = 9
"""Steps of each loss, in turn, whose median says what one costs."""


def step_seconds(
    target: CausalModel, rows: TokenRows, configs: dict[str, HeadConfig]
) -> dict[str, float]:
    """Measure the median CPU seconds of an optimiser step, by loss."""
    modules = {n: HeadModule(build_head(target, c), c) for n, c in configs.items()}
    optimizers = {name: module.configure_optimizers() for name, module in modules.items()}
    times: dict[str, list[float]] = {name: [] for name in configs}
    numbers = torch.arange(4)
    with eager_attention([target.module]):
        for step in range(TIMED + 1):
            for name, module in modules.items():
                started = time.process_time()
                module.loss(rows[numbers], step)[0].backward()
                for optimizer in optimizers[name]:
                    optimizer.step()
                    optimizer.zero_grad()
                times[name].append(time.process_time() - started)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def main() -> None:
    parser = options_of(__doc__, 48)
    parser.add_argument("--warm-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--roots", type=int, default=32, help="roots of a row that get a tree")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    bench = Bench(options)
    target, rows = bench.models[0], TokenRows.plain(bench.pair.rows("train"))
    folder = bench.folder / f"heads-{options.warm_steps}-{options.roots}"
    base = HeadConfig(chain_fraction=0.0, roots=options.roots, precision="32-true")
    first = replace(base, loss=EagleLoss(), steps=options.warm_steps)
    heads = {"warm start": fit_once(target, rows, first, folder / "warm")}
    base = replace(base, steps=options.steps, warm_start=str(heads["warm start"]), seed=1)
    configs = {name: replace(base, loss=loss) for name, loss in LOSSES.items()}
    seconds = step_seconds(target, spread(rows, 4), configs)
    for name, config in configs.items():
        for steps in {options.steps, round(options.steps * seconds[SLOWEST] / seconds[name])}:
            longer = replace(config, steps=steps)
            title = f"{name}, {steps} steps"
            heads[title] = fit_once(target, rows, longer, folder / title)
    methods = {
        f"{name} / {tree}": (policy(), rule, EagleDrafter.from_pretrained(where, target))
        for name, where in heads.items()
        for tree, (policy, rule) in TREES.items()
    }
    table = []
    for temperature in options.temperatures:
        setting = SamplingSetting(temperature)
        decoded = bench.decode(f"heads-t{temperature:g}", setting, methods)
        for name in heads:
            lengths = (decoded.figure(LENGTH, f"{name} / {tree}") for tree in TREES)
            table.append([str(setting), name, *lengths])
    costs = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    note = f"Tokens a target pass. A step's CPU seconds, interleaved medians: {costs}."
    report("heads", ["setting", "head", *TREES], table, [note])


if __name__ == "__main__":
    main()
