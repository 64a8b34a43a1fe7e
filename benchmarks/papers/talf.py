"""“SALF & TALF”: Tables 1, 2 and 4, and Figure 2b.

    python -m benchmarks.papers.talf --run checkpoints/default --steps 250 120

Heads are trained as the paper does for its Llama pairs: an EAGLE head first, and from it one head a
loss for equal steps. “SALF & TALF” is the TALF head (top-4) with SALF trees at a threshold of 0.6;
the other two draft by beam search.
"""

import argparse
from copy import copy
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from benchmarks.heads import LOSSES, folder_of, looks, seconds_a_step, trained
from benchmarks.papers.shared import LENGTH, SPEED, Bench, options_of, table
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import spread
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.target_trees import TreeLevel, target_features, target_levels
from nde_talf.draft_training.training.head_evaluation import rows_with_roots

TREES = {"Beam search": Beam, "Optimal tree search": Optimal, "SALF": Salf}
"""Their defaults are the paper's: N = 60, k = B = 10, depth 7, th = 0.6."""
ROWS = {
    "EAGLE-2": "EAGLE-2 / Beam search",
    "HASS": "HASS / Beam search",
    "SALF & TALF": "TALF / SALF",
}
THRESHOLDS = [n / 10 for n in range(1, 10)]
RANKS = 5
BINS = 15
"""Of the calibration error, equally wide."""
STRIDE = 8
"""Every so many tokens is a root of Figure 2b."""


def curves(bench: Bench, steps: tuple[int, int], picture: Path) -> str:
    """Plot tokens a target pass over training time, and tell when TALF overtakes the others.

    The heads that `Looks` saved decode every fourth prompt by beam search at temperature 0.
    """
    few, made, seconds = copy(bench), dict[str, tuple](), dict[str, float]()
    few.prompts = bench.prompts[::4]
    timed = seconds_a_step(bench, steps, wirings=["EAGLE"])["seconds"]
    for loss in LOSSES:
        folder = folder_of(bench, steps, loss)
        for look in looks(folder):
            name = f"{loss} at-{look['step']}"
            head = load_head(folder / f"at-{look['step']}", bench.models[0])
            made[name], seconds[name] = (
                (Beam(), "nss", EagleDrafter(head)),
                look["step"] * timed[loss],
            )
    decoded = few.decode(f"talf-curves-{steps[0]}-{steps[1]}", SamplingSetting(0.0), made)
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
    axes.set(xscale="log", xlabel="seconds of training after EAGLE's", ylabel="tokens a pass")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_formatter("")
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
        first = tree_features(head, tokens, features, roots, [], document=document)[0][:, roots - 1]
        guesses = head.logits(first).topk(RANKS, -1).indices
        levels = [TreeLevel(guesses, torch.zeros_like(guesses))]
        drafted = tree_features(head, tokens, features, roots, levels, document=document)[-1]
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
