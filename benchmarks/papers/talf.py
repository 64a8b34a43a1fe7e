"""“SALF & TALF”: Tables 1, 2 and 4, and Figure 2b.

    python -m benchmarks.papers.talf --run checkpoints/default --steps 250 120

Heads are trained as the paper does for its Llama pairs: an EAGLE head first, and from it one head a
loss for equal steps. “SALF & TALF” is the TALF head (top-4) with SALF trees at a threshold of 0.6;
the other two draft by beam search.
"""

import argparse
import time
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.heads import Looks
from benchmarks.papers.shared import LENGTH, SPEED, Bench, options_of, table
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import spread
from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.draft_training.evaluate import SAMPLED, rows_with_roots
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.target_trees import TargetTrees, target_features, target_levels
from nde_talf.draft_training.train_head import HeadModule, build_head
from nde_talf.draft_training.trainer import train_rows
from nde_talf.draft_training.tree_attention import TreeLevel

LOSSES = {
    "EAGLE-2": EagleLoss(),
    "HASS": HassLoss(detach_features=False),
    "TALF": TalfLoss(k=4),
}
TREES = {"Beam search": Beam, "Optimal tree search": Optimal, "SALF": Salf}
"""Their defaults are the paper's: N = 60, k = B = 10, depth 7, th = 0.6."""
ROWS = {
    "EAGLE-2": "EAGLE-2 / Beam search",
    "HASS": "HASS / Beam search",
    "SALF & TALF": "TALF / SALF",
}
LATER_RATES = {"lr_muon": HeadConfig.lr_muon / 4, "lr_adam": HeadConfig.lr_adam / 4}
"""Peak rates of the second phase."""
THRESHOLDS = [n / 10 for n in range(1, 10)]
RANKS = 5
BINS = 15
"""Of the calibration error, equally wide."""
STRIDE = 8
"""Every so many tokens is a root of Figure 2b."""


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


class Snapshots(Looks):
    """Evaluates the head on held-out text while it trains, and saves it with the time so far."""

    steps, seconds, began = 0, 0.0, 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self.began = time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        """Stop the clock, and save the head where a look is due.

        A training that was resumed counts all steps at the mean time of those since then.
        """
        self.seconds, self.steps = self.seconds + time.process_time() - self.began, self.steps + 1
        if (step := trainer.global_step) in self.at:
            save_head(module.head, folder := self.file.parent / f"at-{step}")
            write_json(folder.with_suffix(".json"), {"seconds": self.seconds / self.steps * step})
        super().on_train_batch_end(trainer, module)


def folder_of(bench: Bench, steps: tuple[int, int]) -> Path:
    """The folder of the heads that are trained for so many steps."""
    return bench.folder / f"heads-{steps[0]}-{steps[1]}"


def trained(bench: Bench, steps: tuple[int, int]) -> dict[str, EagleHead]:
    """A head a loss, trained where it is not there yet."""
    target, heads, folder = bench.models[0], {}, folder_of(bench, steps)
    base = HeadConfig(chain_fraction=0.0, roots=32)
    warm = replace(base, loss=EagleLoss(), steps=steps[0])
    start = fit_once(bench, warm, folder / "warm")
    # At the first rates again a head forgets: TALF's overlap at depth 0 fell from 0.79 to 0.48.
    after = replace(base, steps=steps[1], warm_start=str(start), seed=1, **LATER_RATES)
    for name, loss in LOSSES.items():
        config = replace(after, loss=loss)
        heads[name] = load_head(fit_once(bench, config, folder / name), target)
    return heads


def fit_once(bench: Bench, config: HeadConfig, folder: Path) -> Path:
    """The folder of a head's export, which is trained where it is not there."""
    export = folder / "export"
    if not export.exists():
        print(f"training the head {folder.name}: {config.steps} steps")
        folder.mkdir(parents=True, exist_ok=True)
        target = bench.models[0]
        train, held_out = (
            TokenRows.plain(rows[:, : target.max_context - SAMPLED])
            for rows in (bench.pair.rows("train"), spread(bench.pair.rows("held_out"), 8))
        )
        looks = Snapshots(folder / "looks.jsonl", held_out, config.steps)
        module = Repeating(build_head(target, config), config)
        batches = Batches(train, config.batch)
        train_rows(module, batches, folder / "training", callbacks=[looks], rows_in_step=1)
        module.head.trained_in = module.trained_in
        save_head(module.head.eval().requires_grad_(False), export)
    return export


def curves(bench: Bench, steps: tuple[int, int], picture: Path) -> str:
    """Plot tokens a target pass over training time, and tell when TALF overtakes the others.

    The heads that `Snapshots` saved decode every fourth prompt by beam search at temperature 0.
    """
    few, made, seconds = copy(bench), dict[str, tuple](), dict[str, float]()
    few.prompts = bench.prompts[::4]
    for loss in LOSSES:
        for file in (folder_of(bench, steps) / loss).glob("at-*.json"):
            name, head = f"{loss} {file.stem}", load_head(file.with_suffix(""), bench.models[0])
            made[name] = Beam(), "nss", EagleDrafter(head)
            seconds[name] = read_json(file)["seconds"]
    decoded = few.decode("talf-curves", SamplingSetting(0.0), made)
    axes = (figure := Figure(figsize=(5, 3.2), layout="constrained")).subplots()
    lines = {}
    for loss in LOSSES:
        names = sorted((n for n in made if n.startswith(loss)), key=seconds.__getitem__)
        passes = [[(r.tokens, r.steps) for r in decoded.of(name)] for name in names]
        tau = [tokens / count for tokens, count in (map(sum, zip(*x, strict=True)) for x in passes)]
        times = [seconds[name] for name in names]
        axes.plot(times, tau, marker=".", label=loss)
        lines[loss] = np.log(times), tau
    said, grid = [], np.linspace(*lines["TALF"][0][[0, -1]], 400)
    for loss in ("EAGLE-2", "HASS"):
        ahead = np.interp(grid, *lines["TALF"]) > np.interp(grid, *lines[loss])
        first = len(grid) - ahead[::-1].argmin() if not ahead.all() else 0
        at = np.exp(grid[first]) if first < len(grid) else np.inf
        axes.axvline(at, color="gray", linestyle=":", linewidth=1)
        said.append(f"{loss} from {at:.0f} s on")
    axes.set(xscale="log", xlabel="CPU seconds of training after EAGLE's", ylabel="tokens a pass")
    axes.legend()
    figure.savefig(picture, dpi=120)
    return f"Equal time, beam search, T = 0: TALF is ahead of {', of '.join(said)}"


def calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Compute the expected calibration error (Guo et al. 2017) of n outcomes.

    It is the sum over bins of confidence of |mean correct - mean confidence|, weighted with the
    fraction of the outcomes in the bin.

    Args:
        confidence: [n], a probability.
        correct: [n], whether what it is of came about.
    """
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((correct[index == b] - confidence[index == b]).sum()) for b in range(BINS)]
    return float(sum(gaps) / len(confidence))


@torch.inference_mode()
def after_ranks(
    head: EagleHead, target: CausalModel, rows: TokenRows
) -> tuple[np.ndarray, np.ndarray]:
    """The head after its own n-th most likely token, n = 1..RANKS (Figure 2b).

    Returns:
        Each [RANKS, n]: the head's probability of the target's most likely next token, as in
        Appendix A of the paper; whether that is the head's most likely one too.
    """
    found: list[list[Tensor]] = [[], []]
    for row, roots in rows_with_roots(rows.to(target.device), STRIDE):
        tokens, document = row.tokens, row.document
        _, features = target_features(target, tokens, document, layers=head.feature_layers)
        first = head.tree_features(tokens, features, roots, [], document=document)[0][:, roots - 1]
        guesses = head.logits(first).topk(RANKS, -1).indices
        levels = [TreeLevel(guesses, torch.zeros_like(guesses))]
        drafted = head.tree_features(tokens, features, roots, levels, document=document)[-1]
        wanted = target_levels(target, tokens, roots, levels, document=document)[0]
        q = head.logits(drafted).float().softmax(-1)
        label = target.logits(wanted).argmax(-1, keepdim=True)
        agree = q.argmax(-1, keepdim=True) == label
        for parts, values in zip(found, (q.gather(-1, label), agree.float()), strict=True):
            parts.append(values[..., 0].flatten(0, 1))
    confidence, agreed = (torch.cat(parts).T.cpu().numpy() for parts in found)
    return confidence, agreed


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    bench = Bench(options)
    heads = trained(bench, options.steps)
    crossed = {
        f"{name} / {tree}": (make(), "nss", EagleDrafter(head))
        for name, head in heads.items()
        for tree, make in TREES.items()
    }
    for temperature in (0.0, 1.0):
        decoded = bench.decode(f"talf-t{temperature:g}", SamplingSetting(temperature), crossed)
        for title, rows in (("Table 1", ROWS), ("Table 2", {name: name for name in crossed})):
            for measure in (SPEED, LENGTH):
                table(
                    f"{title}: {measure}, temperature {temperature:g}",
                    "Method",
                    rows,
                    bench.kinds,
                    lambda name, kind, rows=rows, measure=measure, decoded=decoded: decoded.figure(
                        measure, rows[name], kind
                    ),
                )
    swept = {
        f"{at:g}": (Salf(threshold=at), "nss", EagleDrafter(heads["TALF"])) for at in THRESHOLDS
    }
    decoded = bench.decode("talf-threshold", SamplingSetting(0.0), swept)
    table(
        "Table 4: SALF thresholds, TALF head, temperature 0",
        "Threshold",
        swept,
        [SPEED, LENGTH],
        lambda at, measure: decoded.figure(measure, at),
    )
    calibration(bench, heads)


def calibration(bench: Bench, heads: dict[str, EagleHead]) -> None:
    """Print Figure 2b."""
    held_out = TokenRows.plain(spread(bench.pair.rows("held_out"), 16))
    ranked = {name: after_ranks(head, bench.models[0], held_out) for name, head in heads.items()}

    def both(name: str, rank: str) -> str:
        confidence, agreed = (part[int(rank) - 1] for part in ranked[name])
        return f"{agreed.mean():.3f}, {calibration_error(confidence, agreed):.3f}"

    table(
        "Figure 2b: top-1 accuracy, and expected calibration error, after the head's n-th token",
        "Loss",
        heads,
        [str(rank) for rank in range(1, RANKS + 1)],
        both,
    )


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 64)
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(250, 120), help="of an EAGLE head, then of each loss"
    )
    report(parser.parse_args())


if __name__ == "__main__":
    main()
