"""Labels: roots a second from super-trees, against trees drawn for every action.

`python -m benchmarks.labels [--run checkpoints/default]`, after `python -m pipelines.run`.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import interleaved, report
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.label_chunks import chunk_rows, labels
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.data.traces.super_trees import Prefix, super_trees
from nde_talf.data.traces.trace import root_positions
from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.rules.labels import (
    Bundle,
    branch_gains,
    trunk_reach,
)
from nde_talf.decoding.sampling import SamplingSetting, warp
from nde_talf.decoding.super_tree import SuperTreeLayout, super_tree_layout

VERIFIER = "specinfer"  # of the first two tables


def own_layout(action: Action) -> SuperTreeLayout:
    """The rows of one action's delayed tree: branches behind the end of the trunk only."""
    whole = super_tree_layout(action.k, action.l1, action.l2)
    kept = torch.cat([torch.arange(action.l1 + 1), whole.paths[-1].T.flatten()])
    row = torch.full((len(whole),), -1).scatter(0, kept, torch.arange(len(kept)))
    parents = torch.where(whole.parents[kept] < 0, -1, row[whole.parents[kept]])
    return replace(
        whole,
        parents=parents,
        depth=whole.depth[kept],
        ancestors=whole.ancestors[kept][:, kept],
        paths=row[whole.paths[-1:]],
        inner=int(parents.max()) + 1,
    )


def own_label(p: Tensor, q: Tensor, tokens: Tensor, layout: SuperTreeLayout) -> Tensor:
    """Compute Eq. 3 of one action from trees of its own [T], the last level in expectation."""
    count, rows, _ = p.shape
    tree = torch.arange(count)[:, None, None, None]

    def bundle(paths: Tensor) -> Bundle:
        nodes = (layout.parents[paths] + tree * rows).flatten(0, 1)
        return Bundle(p.flatten(0, 1), q.flatten(0, 1), tokens[tree, paths].flatten(0, 1), nodes)

    levels = torch.arange(1, layout.l1 + 1).view(-1, 1, 1)
    reach, trunk = trunk_reach(bundle(levels), count, VERIFIER)
    if not layout.l2:
        return 1 + trunk[:, -1]
    return reach.sum(-1) + branch_gains(bundle(layout.paths), reach[:, -1], VERIFIER)[:, -1, -1]


class Roots:
    """The roots along one trajectory, with the prefix inside both models."""

    def __init__(
        self,
        pair: tuple[CausalModel, CausalModel],
        prompt: list[int],
        trajectory: list[int],
        setting: SamplingSetting,
    ):
        self.setting = setting
        self.target, self.draft = target, draft = pair
        self.tokens = torch.tensor(trajectory)
        self.positions = torch.tensor(root_positions(prompt, trajectory, 16))
        self.prefixes = Prefix(target, self.tokens), Prefix(draft, self.tokens)
        self.generator = torch.Generator().manual_seed(0)

    def trees(self, samples: int, layout: SuperTreeLayout, micro_batch: int) -> Iterator:
        roots = self.positions.repeat_interleave(samples)
        for part in roots.split(micro_batch):
            uniforms = torch.rand(
                len(part), len(layout), generator=self.generator, dtype=torch.float64
            )
            yield super_trees(*self.prefixes, part, layout, self.setting, uniforms)

    def by_super_trees(self, samples: int) -> None:
        layout = super_tree_layout()
        chunk = chunk_rows(self.target.vocab_size, 0, layout)
        for trees in self.trees(samples, layout, 8):
            labels(
                trees,
                self.target,
                self.draft,
                [(self.setting, self.setting)],
                [VERIFIER],
                layout,
                chunk,
            )

    def by_own_trees(self, samples: int) -> None:
        for action in TREES:
            if action.depth:
                layout = own_layout(action)
                for trees in self.trees(samples, layout, len(self.positions) * samples):
                    p = warp(self.target.logits(trees.h_p), self.setting)
                    own_label(
                        p, warp(self.draft.logits(trees.h_q), self.setting), trees.tokens, layout
                    )


@contextmanager
def forward_seconds(*models: CausalModel) -> Iterator[list[float]]:
    """Sum the seconds in the models inside the block, as the one number of a list."""
    total = [0.0]

    def timed(call):
        def inner(*arguments):
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                total[0] += time.perf_counter() - started

        return inner

    for model in models:
        model.hidden, model.logits = timed(model.hidden), timed(model.logits)
    yield total
    for model in models:
        del model.hidden, model.logits


@torch.inference_mode()
def speed(
    target: CausalModel,
    draft: CausalModel,
    prompts: list[list[int]],
    setting: SamplingSetting,
    repeats: int,
) -> None:
    """Time the labels of all trees at the roots of one trajectory, four super-trees a root."""
    trajectory = max(TransformersEngine(target).sample(prompts, setting, 64, 0), key=len)
    prompt = next(p for p in prompts if trajectory[: len(p)] == p)
    roots = Roots((target, draft), prompt, trajectory, setting)
    tasks = {
        "super-trees": lambda: roots.by_super_trees(4),
        "own trees": lambda: roots.by_own_trees(4),
    }
    times = interleaved(tasks, repeats)
    with forward_seconds(target, draft) as inside:
        started = time.perf_counter()
        roots.by_super_trees(4)
        share = inside[0] / (time.perf_counter() - started)
    count = len(roots.positions)
    rows = [
        [
            name,
            count / seconds,
            times.seconds["own trees"] / seconds,
            times.cpu["own trees"] / times.cpu[name],
        ]
        for name, seconds in times.seconds.items()
    ]
    rows[0].append(f"{100 * share:.0f} %")
    rows[1].append("–")
    columns = [
        "labels of all trees, s = 4",
        "roots a second",
        "times as many",
        "by CPU time",
        "of it in the models' passes",
    ]
    report("labels", columns, rows, [times.note()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--setting", default="t1.0")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two on a shared machine may stall
    pair = Pair(options.run / "pair")
    target, draft = pair.models("cpu", "float32")
    prompts = [p.tokens for p in pair.prompts("test", options.prompts, "--prompts")]
    speed(target, draft, prompts, SETTINGS[options.setting], options.repeats)


if __name__ == "__main__":
    main()
