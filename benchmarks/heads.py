"""Heads of three wirings, each trained with three losses on one target, until they gain little.

`python -m benchmarks.heads --run FOLDER`, the run of `benchmarks.papers.claims`. As the SALF & TALF
paper has it, a head of each wiring learns depth 0 by EAGLE's loss first, and from it one head a
loss goes on for equal steps. Overlap on held-out text is recorded on the way, and a step of each
training is timed alone, so that the picture compares them at equal time. Then all heads decode the
same prompts.

An interrupted command goes on where it stopped. Several processes share the trainings with
`--train "EAGLE, HASS"`, `--train "EAGLE-3, TALF"` and so on, once the first phases are there
(`--train "EAGLE, warm"`). `--train time` times the steps: run nothing beside it.
"""

import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.papers.shared import LENGTH, Bench, options_of
from benchmarks.timing import RESULTS, report
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import spread
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.bootstrap import times
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.targets.target_trees import TargetTrees
from nde_talf.draft_training.training.head_evaluation import SAMPLED, held_out_report
from nde_talf.draft_training.training.head_training import HeadModule, build_head
from nde_talf.draft_training.training.trainer import train_rows
from nde_talf.draft_training.training_settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed import speed_ratio
from recipes.small.steps import TEXT_ROWS, samples

THREE: dict[str, Any] = {"features": "three"}
WIRINGS: dict[str, dict[str, Any]] = {
    "EAGLE": {},
    "EAGLE-3": THREE,
    "EAGLE 3.1": {**THREE, "norms": ["fc_norm", "norm_output"]},
}
LOSSES = {"EAGLE-2": EagleLoss(), "HASS": HassLoss(detach_features=False), "TALF": TalfLoss(k=4)}
"""As the SALF & TALF paper prints them."""
TOP_2, OWN_TEXT = "TALF, k = 2", "TALF, own text"
"""More heads by TALF's loss: the paper's Table 3, and on text that the target wrote."""
WARM, TIME = "warm", "time"
LATER_RATES = {"lr_muon": HeadConfig.lr_muon / 4, "lr_adam": HeadConfig.lr_adam / 4}
"""Peak rates of the second phase.

At the first ones a head forgets: TALF's overlap at depth 0 fell from 0.79 to 0.48.
"""
STEPS = 2600, 6000
"""Steps of the two phases."""
OWN_TEXTS = 2048
"""Texts that the target writes for `OWN_TEXT`, at most."""
BATCH, TIMED_STEPS = 4, 40
"""Rows of a step, and steps that are timed."""
BEAM = "beam, NSS"
TREES = {
    BEAM: (Beam, "nss"),
    "(4, 1, 3), SpecInfer": (lambda: Delayed(Action(4, 1, 3)), "specinfer"),
}
LOOKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 2 / 3, 5 / 6, 1.0)
"""Fractions of a training after which held-out text is looked at."""


@dataclass
class Batches:
    """Batches of `size` rows, whose rows stay together from epoch to epoch."""

    rows: TokenRows
    size: int

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def __getitem__(self, index: Tensor) -> TokenRows:
        """The batch whose number is index [1]."""
        first = int(index) * self.size
        return self.rows[torch.arange(first, first + self.size)]


class Repeating(HeadModule):
    """Keeps the target's trees of every batch, so that only the first epoch runs the target."""

    def __init__(self, head: EagleHead, config: HeadConfig):
        super().__init__(head, config)
        self.kept: dict[bytes, TargetTrees] = {}

    def loss(self, batch: TokenRows, step: int, part: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """See `HeadModule`. A batch has the same roots in every epoch."""
        return super().loss(batch, int(batch.tokens.sum()), part)

    def _trees(self, tokens: Tensor, *where: Any) -> TargetTrees:
        key = tokens.numpy().tobytes()
        if key not in self.kept:
            self.kept[key] = super()._trees(tokens, *where)
        return self.kept[key]


class Looks(pl.Callback):
    """Looks at held-out text while a head trains, and saves the head.

    A line of `looks.jsonl` and a folder `at-STEP` for each of `LOOKS`.
    """

    def __init__(self, folder: Path, rows: TokenRows, steps: int) -> None:
        self.folder, self.rows = folder, rows
        self.at = {round(steps * fraction) for fraction in LOOKS}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        """Look where that is due."""
        if (step := trainer.global_step) in self.at:
            save_head(module.head, self.folder / f"at-{step}")
            with trainer.precision_plugin.forward_context():
                found = held_out_report(module.head, module.head.target, self.rows)
            with (self.folder / "looks.jsonl").open("a") as out:
                out.write(json.dumps({"step": step, **found}) + "\n")


class Clock(pl.Callback):
    """Times every step of a training."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, []  # type: float, list[float]

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock: the figures have been read, so a GPU is done."""
        self.seconds.append(time.perf_counter() - self.began)


def looks(folder: Path) -> list[dict[str, Any]]:
    """Read the reports of a training, the first of each step, in the order of the steps."""
    lines = [json.loads(line) for line in (folder / "looks.jsonl").read_text().splitlines()]
    return sorted(
        {line["step"]: line for line in reversed(lines)}.values(), key=lambda x: x["step"]
    )


def ended(folder: Path, what: str = "overlap") -> tuple[list[float], float]:
    """A figure by depth at the end of a training, and what its mean gained in the last third."""
    seen = looks(folder)
    steps = seen[-1]["step"]
    before = next(x[what] for x in seen if x["step"] == round(steps * LOOKS[-3]))
    last = seen[-1][what]
    return last, (sum(last) - sum(before)) / len(last)


def folder_of(bench: Bench, steps: tuple[int, int], name: str, wiring: str = "EAGLE") -> Path:
    """The folder of a head: of a loss, or "warm" for the first phase."""
    folder = bench.folder / f"heads-{steps[0]}-{steps[1]}"
    return folder / (name if wiring == "EAGLE" else f"{wiring}, {name}")


def configured(
    start: Path, steps: tuple[int, int], name: str, wiring: str, batch: int
) -> HeadConfig:
    """Return the settings of the first phase (`WARM`), or of one that goes on from `start`."""
    base = HeadConfig(chain_fraction=0.0, roots=32, batch=batch, **WIRINGS[wiring])
    if name == WARM:
        return replace(base, loss=_without_target(base, EagleLoss()), steps=steps[0])
    loss = _without_target(base, LOSSES.get(name, TalfLoss(k=2 if name == TOP_2 else 4)))
    after = replace(base, steps=steps[1], warm_start=str(start), seed=1, **LATER_RATES)
    return replace(after, loss=loss)


def trained(
    bench: Bench,
    steps: tuple[int, int],
    names: Iterable[str] = LOSSES,
    wiring: str = "EAGLE",
    batch: int = BATCH,
    text: Tensor | None = None,
) -> dict[str, EagleHead]:
    """Heads by loss, `TOP_2` or `OWN_TEXT`, trained where they are not there yet.

    text: rows to train on in place of the run's.
    """
    heads, text = {}, bench.pair.rows("train") if text is None else text
    where = folder_of(bench, steps, WARM, wiring)
    start = _fit_once(bench, configured(where, steps, WARM, wiring, batch), where, text)
    for name in names:
        folder, rows = folder_of(bench, steps, name, wiring), text
        if name == OWN_TEXT:
            written = folder.parent / "samples"
            rows = samples(bench.pair.where("target"), written, text, min(len(text), OWN_TEXTS))
        config = configured(start, steps, name, wiring, batch)
        heads[name] = load_head(_fit_once(bench, config, folder, rows), bench.models[0])
    return heads


def _without_target(config: HeadConfig, loss: Any) -> Any:
    """The loss, without a regression to the target's feature where a head has none."""
    three = config.features == "three"
    return replace(loss, regression=0.0) if three and loss.regression else loss


def _fit_once(bench: Bench, config: HeadConfig, folder: Path, text: Tensor) -> Path:
    """The folder of a head's export, which is trained on rows of `text` where it is not there."""
    export = folder / "export"
    if not export.exists():
        print(f"training the head {folder.name}: {config.steps} steps", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        target = bench.models[0]
        train, held_out = (
            TokenRows.plain(rows[:, : target.max_context - SAMPLED])
            for rows in (text, spread(bench.pair.rows("held_out"), 32))
        )
        see = Looks(folder, held_out, config.steps)
        kind = Repeating if target.device.type == "cpu" else HeadModule
        module = kind(build_head(target, config), config)
        batches = Batches(train, config.batch)
        train_rows(module, batches, folder / "training", callbacks=[see], rows_in_step=1)
        module.head.trained_in = module.trained_in
        save_head(module.head.eval().requires_grad_(False), export)
    return export


def seconds_a_step(
    bench: Bench,
    steps: tuple[int, int],
    batch: int = BATCH,
    text: Tensor | None = None,
    wirings: Iterable[str] = WIRINGS,
) -> dict[str, Any]:
    """Time a step of second phases alone: median `seconds` by a head's folder, and `device`.

    They are measured once and kept; the first phases have to be there.
    """
    target, kept = bench.models[0], folder_of(bench, steps, WARM).parent / "seconds.json"
    on_gpu = target.device.type == "cuda"
    device = torch.cuda.get_device_name(target.device) if on_gpu else "CPU, one thread"
    found = {"device": device, "rows": batch, "seconds": {}}
    found = json.loads(kept.read_text()) if kept.exists() else found
    rows = bench.pair.rows("train") if text is None else text
    rows = TokenRows.plain(rows[:, : target.max_context - SAMPLED])
    for wiring, name in product(wirings, LOSSES):
        folder = folder_of(bench, steps, name, wiring).name
        if folder not in found["seconds"]:
            start = folder_of(bench, steps, WARM, wiring) / "export"
            config = configured(start, steps, name, wiring, batch)
            config = replace(config, steps=TIMED_STEPS, checkpoint_seconds=1e6)
            clock, module = Clock(), HeadModule(build_head(target, config), config)
            with tempfile.TemporaryDirectory() as place:
                train_rows(module, rows, Path(place), callbacks=[clock])
            found["seconds"][folder] = statistics.median(clock.seconds)
            kept.write_text(json.dumps(found, indent=1))
    return found


def picture(bench: Bench, steps: tuple[int, int]) -> None:
    """Draw the predicted accepted length over seconds of training, a panel a wiring."""
    timed = seconds_a_step(bench, steps)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(WIRINGS), sharey=True)
    for panel, wiring in zip(panels, WIRINGS, strict=True):
        for name in LOSSES:
            folder = folder_of(bench, steps, name, wiring)
            lengths = [length(x["overlap"]) for x in looks(folder)]
            each = timed["seconds"][folder.name]
            at = [x["step"] * each / 60 for x in looks(folder)]
            panel.plot(at, lengths, marker=".", label=name)
        panel.set(title=f"{wiring} wiring", xlabel="min after depth 0")
        panel.legend(fontsize="small")
    panels[0].set_ylabel("1 + sums of products of overlap")
    figure.savefig(RESULTS / "heads.png", dpi=110)


def length(overlap: list[float]) -> float:
    """Predict the tokens a pass of a path of as many draws: 1 + the sum of products."""
    return 1 + float(torch.tensor(overlap).cumprod(0).sum())


def compare(bench: Bench, options: Namespace) -> None:
    """Decode with all heads, and report."""
    methods, setting = {}, [SamplingSetting(t) for t in (0.0, 1.0)]
    timed = seconds_a_step(bench, options.steps)
    for wiring in WIRINGS:
        for name, head in trained(bench, options.steps, wiring=wiring).items():
            for tree, (make, rule) in TREES.items():
                methods[f"{wiring}, {name} / {tree}"] = make(), rule, EagleDrafter(head)
    steps = "-".join(map(str, options.steps))
    decoded = [bench.decode(f"heads-{steps}-t{at.temperature:g}", at, methods) for at in setting]
    table = []
    for wiring, name in product(WIRINGS, LOSSES):
        folder = folder_of(bench, options.steps, name, wiring)
        last, gain = ended(folder)
        taus = [
            each.figure(LENGTH, f"{wiring}, {name} / {tree}") for each in decoded for tree in TREES
        ]
        compared = [
            times(speed_ratio(each.of(f"{wiring}, {name} / {BEAM}"), each.of(other), "steps"))
            for other in (f"{wiring}, HASS / {BEAM}", f"EAGLE, {name} / {BEAM}")
            for each in decoded
        ]
        by_depth = " ".join(f"{x:.3f}" for x in last)
        seconds = f"{looks(folder)[-1]['step'] * timed['seconds'][folder.name]:.0f}"
        table.append([f"{wiring}, {name}", seconds, by_depth, f"{gain:+.4f}", *taus, *compared])
    columns = [f"τ, {at}, {tree}" for at in setting for tree in TREES]
    columns += [f"beam over {of}, {at}" for of in ("its HASS", "EAGLE's wiring") for at in setting]
    first = ["wiring, loss", "s", "overlap after 0 to 4 drafts", "gain of last third"]
    control = [times(speed_ratio(each.of(CONTROL), each.of(BASELINE))) for each in decoded]
    notes = [
        f"{len(bench.prompts)} held-out prompts, {options.new_tokens} tokens each; plain decoding"
        f" over itself {' and '.join(control)}. Seconds are those of {options.steps[1]} steps of"
        f" {timed['rows']} rows after depth 0, one training at a time ({timed['device']}); the gain"
        " is of the mean overlap.",
        "![Predicted accepted length over seconds of training](heads.png)",
    ]
    report("heads", [*first, *columns], table, notes)
    picture(bench, options.steps)  # last: the table names the commit that it was made on


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 48)
    kinds = WARM, *LOSSES, TOP_2, OWN_TEXT
    names = [f"{wiring}, {name}" for wiring in WIRINGS for name in kinds]
    parser.add_argument("--train", nargs="+", choices=[*names, TIME], help="do these and stop")
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="of each phase")
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of a step")
    parser.add_argument("--rows", type=Path, help="text/rows.safetensors of the shipped recipe")
    options = parser.parse_args()
    bench = Bench(options)
    text = load_file(options.rows)["train"][-TEXT_ROWS:].long() if options.rows else None
    for asked in options.train or ():
        wiring, _, name = asked.partition(", ")
        if asked == TIME:
            seconds_a_step(bench, options.steps, options.batch, text)
        else:
            some = [name] if name != WARM else []
            trained(bench, options.steps, some, wiring, options.batch, text)
    if not options.train:
        compare(bench, options)


if __name__ == "__main__":
    main()
