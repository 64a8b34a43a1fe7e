"""Noise of the labels at equal cost: what the exact last level removes, and that it biases nothing.

`python -m benchmarks.labels [--run checkpoints/default]`, after `python -m pipelines.run`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.timing import report
from data.pair import Pair
from data.super_trees import Prefix, Scored, scored_super_trees
from data.traces import SETTINGS
from data.trajectories import sample_trajectories
from decoding.actions import TREES
from decoding.sampling import SamplingSetting
from decoding.super_tree import SuperTreeLayout, super_tree_layout
from decoding.verification.acceptance import BRANCHING
from decoding.verification.expected import LABELLED, expected_block_efficiency


def scored_roots(
    run: Path, setting: SamplingSetting, layout: SuperTreeLayout, prompts: int, samples: int, stride: int = 16
) -> Iterator[Scored]:
    """`samples` super-trees at a root every `stride` tokens of the target's own trajectories; the roots of one prompt at a
    time, numbered within it."""
    pair = Pair(run / "pair")
    target, draft = pair.models("cpu", "float32")
    chosen = pair.prompts("test", prompts, "--prompts")
    trajectories = sample_trajectories(target, [p.tokens for p in chosen], setting, 64, 0)
    generator = torch.Generator().manual_seed(0)
    for prompt, trajectory in zip(chosen, trajectories, strict=True):
        tokens = torch.tensor(trajectory)
        positions = torch.arange(len(prompt.tokens), len(trajectory), stride)
        if len(positions):
            with torch.inference_mode():
                prefixes = Prefix(target, tokens), Prefix(draft, tokens)
                yield from scored_super_trees(
                    *prefixes, tokens, positions, samples, layout, setting, setting, len(positions) * samples, generator
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--setting", default="t1.0")
    options = parser.parse_args()
    layout = super_tree_layout()
    drafting = torch.tensor([tree.depth > 0 for tree in TREES])
    values = {(name, exact): [] for name in LABELLED for exact in ((False, True) if name in BRANCHING else (True,))}
    for scored in scored_roots(options.run, SETTINGS[options.setting], layout, options.prompts, options.samples, 32):
        for (name, exact), parts in values.items():
            found = expected_block_efficiency(scored.p, scored.q, scored.tokens, name, layout, exact, check=False)
            parts.append(found.view(-1, options.samples, len(TREES))[..., drafting])
    depths = torch.tensor([tree.depth for tree in TREES])[drafting]
    groups = {"1": depths == 1, "2": depths == 2, "3-4": (depths > 2) & (depths < 5), "5-16": depths > 4}
    rows = []
    for name in LABELLED:
        exact = torch.cat(values[name, True])  # [roots, samples, A]
        row: list = [name, float(exact.mean()), float(exact.var(1).mean().sqrt())]
        if name in BRANCHING:
            sampled = torch.cat(values[name, False])
            difference = (exact - sampled).mean(-1).flatten()
            error = float(difference.std() / len(difference) ** 0.5)
            removed = 1 - exact.var(1).mean(0) / sampled.var(1).mean(0)
            row += [*(f"{100 * float(removed[group].mean()):.1f} %" for group in groups.values())]
            row.append(f"{float(difference.mean()):+.4f} ± {error:.4f}")
        else:
            row += ["–"] * (len(groups) + 1)
        rows.append(row)
    columns = ["method", "mean label", "its standard deviation, one super-tree"]
    columns += [f"variance removed, depth {group}" for group in groups]
    report("labels", "python -m benchmarks.labels", [*columns, "difference of means"], rows)


if __name__ == "__main__":
    main()
