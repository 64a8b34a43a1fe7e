"""Heads trained with the losses of EAGLE, HASS and TALF from one warm start, on the same text.

`python -m benchmarks.heads [--run checkpoints/default]`, after stage pair. Heads are trained for
equal optimiser steps, and again for equal CPU time of one thread, in `<run>/heads`; an interrupted
run goes on where it stopped. The table is mean generation length on held-out prompts by loss and
tree (Tables 2 and 3 of the SALF & TALF paper), with 95 % intervals over prompts.
"""

import argparse
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.timing import rate, report
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import Pair, check_prompts, spread
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.draft_training.export import save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import HeadModule, build_head, fit_head
from nde_talf.draft_training.trainer import eager_attention
from nde_talf.evaluation.benchmark import read_records, run_benchmark
from nde_talf.evaluation.loops import Speculative

LOSSES = {"EAGLE": EagleLoss(), "HASS": HassLoss(), "TALF, k = 4": TalfLoss(k=4)}
SLOWEST = "TALF, k = 4"
TREES = {
    "beam": (Beam, "nss"),
    "SALF": (Salf, "nss"),
    "(3, 0, 4), SpecInfer": (lambda: Delayed(Action(3, 0, 4)), "specinfer"),
}
TIMED = 9
"""Steps of each loss, in turn, whose median says what one costs."""


def trained(target: CausalModel, rows: TokenRows, config: HeadConfig, folder: Path) -> Path:
    """Return the folder of a head trained with `config`; one that is there is taken as it is."""
    export, made = folder / "export", folder / "config.json"
    if not (export.exists() and made.exists() and read_json(made) == asdict(config)):
        console.print(f"training {folder}: {config.loss.name}, {config.steps} steps")
        save_head(fit_head(target, rows, config, folder / "training"), export)
        write_json(made, asdict(config))
    return export


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--warm-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--roots", type=int, default=32, help="roots of a row that get a tree")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    pair, folder = Pair(options.run / "pair"), options.run / "heads"
    target, rows = pair.target("cpu", "float32"), TokenRows.plain(pair.rows("train"))
    base = HeadConfig(chain_fraction=0.0, roots=options.roots, precision="32-true")
    first = replace(base, loss=EagleLoss(), steps=options.warm_steps)
    heads = {"warm start": trained(target, rows, first, folder / "warm")}
    base = replace(base, steps=options.steps, warm_start=str(heads["warm start"]), seed=1)
    configs = {name: replace(base, loss=loss) for name, loss in LOSSES.items()}
    seconds = step_seconds(target, spread(rows, 4), configs)
    for name, config in configs.items():
        slug = "".join(filter(str.isalnum, name.lower()))
        heads[name] = trained(target, rows, config, folder / "steps" / slug)
        steps = round(options.steps * seconds[SLOWEST] / seconds[name])
        if name != SLOWEST:
            longer = replace(config, steps=steps)
            heads[f"{name}, {steps} steps"] = trained(target, rows, longer, folder / "time" / slug)
    prompts = pair.prompts("test", options.prompts, "--prompts")
    check_prompts(prompts, target, options.new_tokens + 17, target.max_context)
    entries, records = [(p.id, p.kind, p.tokens) for p in prompts], folder / "records.jsonl"
    settings = [SamplingSetting(temperature) for temperature in options.temperatures]
    for setting in settings:
        methods = {}
        for name, where in heads.items():
            drafter = EagleDrafter.from_pretrained(where, target)
            for tree, (policy, rule) in TREES.items():
                decoder = SpeculativeDecoder(target, drafter, policy(), rule)
                title = f"{name} / {tree}"
                methods[title] = Speculative(title, decoder, setting, options.new_tokens)
        run_benchmark(methods, entries, setting, records, 0)
    every, table = list(read_records(records)), []
    for setting in settings:
        for name in heads:
            table.append([str(setting), name])
            for tree in TREES:
                key = str(setting), f"{name} / {tree}"
                own = [record for record in every if (record.setting, record.method) == key]
                table[-1].append(shown(rate(own, "tokens", "steps")))
    costs = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    note = f"Tokens a target pass. A step's CPU seconds, interleaved medians: {costs}."
    report("heads", ["setting", "head", *TREES], table, [note])


if __name__ == "__main__":
    main()
