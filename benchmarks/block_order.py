"""Non-empty blocks of the tree attention mask before and after reordering (DySpec paper, Table 5
and Figure 9).

`python -m benchmarks.block_order [--run checkpoints/default]`: random trees as in the paper's Table
5, and with a run the trees that DySpec draws on its pair.
"""

import argparse
from itertools import islice
from pathlib import Path
from statistics import mean

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.timing import report
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.dyspec import DySpec, DySpecThreshold
from nde_talf.decoding.rules import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.evaluation.papers.blocks import (
    depth_first,
    heavy_first,
    nonzero_blocks,
    random_trees,
    reordered,
)

BLOCK = 32
PAPER = {256: "36 -> 22.5", 512: "135.5 -> 52.8", 1024: "490.2 -> 119.3", 2048: "1654.5 -> 278.7"}


class Kept:
    """A policy whose trees are remembered."""

    def __init__(self, policy):
        self.policy, self.trees, self.parents = policy, policy.trees, []

    def draft(self, state, drafter, rng):
        tree = self.policy.draft(state, drafter, rng)
        self.parents.append(tree.parents)
        return tree


def drawn_trees(run: Path, policy, prompts: int, steps: int) -> list[list[int]]:
    target, draft = Pair(run / "pair").models("cpu", "float32")
    kept, setting = Kept(policy), SamplingSetting(0.6)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), kept, VERIFIERS["without_replacement"])
    for prompt in Pair(run / "pair").prompts("test", prompts, "--prompts"):
        for _ in islice(decoder.stream(prompt.tokens, setting, Rng.seeded(0)), steps + 1):
            pass
    return kept.parents


def row(name: str, trees: list[list[int]], paper: str = "–") -> list:
    def blocks(order) -> float:
        return mean(nonzero_blocks(reordered(parents, order(parents)), BLOCK) for parents in trees)

    before, after = blocks(lambda parents: range(len(parents))), blocks(depth_first)
    sizes = f"{mean(map(len, trees)):.0f}"
    return [
        name,
        sizes,
        f"{before:.1f}",
        f"{after:.1f}",
        f"{blocks(heavy_first):.1f}",
        f"{before / after:.2f}",
        paper,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--trees", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    found = [
        row("random", random_trees(nodes, options.trees), paper) for nodes, paper in PAPER.items()
    ]
    command = "python -m benchmarks.block_order"
    if options.run:
        command += f" --run checkpoints/{options.run.name}"
        for nodes in (64, 256, 768):
            trees = drawn_trees(options.run, DySpec(nodes), options.prompts, options.steps)
            found.append(
                row(f"DySpec, heap, {nodes}", trees, "366.1 -> 218.3" if nodes == 768 else "–")
            )
        trees = drawn_trees(
            options.run, DySpecThreshold(1 / 768, 768), options.prompts, options.steps
        )
        found.append(row("DySpec, threshold 1/768", trees))
    columns = [
        "trees",
        "nodes",
        "blocks as grown",
        "depth first",
        "heavy first",
        "ratio",
        "DySpec paper",
    ]
    report("block_order", command, columns, found)


if __name__ == "__main__":
    main()
