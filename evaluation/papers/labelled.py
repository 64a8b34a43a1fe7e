"""Cells from labels: the expected block efficiency of every rule and tree at roots along the
target's own texts (Eq. 3 of the NDE paper), and tokens/s from these and the run's latency table.

The labels of all rules under all eight sampling settings come from one trace, a shard a prompt, so
that every method is compared on the same trees. A shard holds labels [roots, samples, 233] a rule;
next-token distributions are never stored.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.store import INDEX, TraceStore
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding.actions import TREES, Action, tree_index
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.common.progress import track
from nde_talf.decoding.names import LABELLED, ON_PATHS
from nde_talf.evaluation.papers.bench import Bench, OutOfTime, Work
from nde_talf.evaluation.papers.resampled import Prompts, Samples
from nde_talf.selector.latency import LatencyTable, StepCosts
from nde_talf.selector.roots import Roots, roots_from_traces

EIGHT = ["t0.2", "t0.4", "t0.6", "t0.8", "t1.0", "t1.2", "p0.9", "p0.99"]
TOKENS, SPEED = "tokens a target call", "tokens/s"
LENGTHS = range(9)


PATHS = [tree_index(Action(1, 0, length)) for length in LENGTHS]
"""Single paths of 0 to 8 tokens, as indices into `nde_talf.decoding.actions.TREES`."""
ROOT_TREES = sorted({tree_index(Action(k, 0, length)) for k in range(1, 5) for length in LENGTHS})
"""The trees of the NDE paper's section 4: K paths of L tokens from the root, K in 1..4 and L in
0..8.
"""
FROM_ROOT = [index for index, tree in enumerate(TREES) if tree.k > 1 and not tree.l1]
"""Delayed trees that branch at the root, and those that branch after a trunk."""
AFTER_TRUNK = [index for index, tree in enumerate(TREES) if tree.k > 1 and tree.l1]


def branching(k: int) -> list[int]:
    """The trees of k paths of 1 to 8 tokens from the root."""
    return [tree_index(Action(k, 0, length)) for length in LENGTHS if length]


def config(bench: Bench) -> TracesConfig:
    """What is traced after each prompt."""
    tokens = bench.tokens(64)
    return TracesConfig(
        EIGHT, new_tokens=tokens, samples=bench.samples, verifiers=list(LABELLED), dtype=bench.dtype
    )


def store(bench: Bench) -> TraceStore:
    """The store of the papers' labels."""
    own = config(bench)
    return TraceStore(bench.folder / f"labels-{own.new_tokens}-{own.samples}-{bench.dtype}")


def tracing(bench: Bench) -> Work:
    """The measurement that makes the labels."""

    def todo() -> list:
        own = store(bench)
        return [prompt for prompt in bench.prompts.every if not own.holds(shard(prompt.id))]

    def seconds() -> float:
        """A super-tree's nodes at the price of the largest tree of the latency table, and as much
        for the labels.
        """
        own, table = config(bench), bench.table
        trees = len(todo()) * len(EIGHT) * own.samples * -(-own.new_tokens // own.stride)
        return trees * 2 * 297 / table.nodes[-1] * table.target[0][-1]

    def run(deadline: float) -> None:
        own, missing = store(bench), todo()
        for prompt in track(missing, "labels", len(missing), "prompt") if missing else ():
            if time.monotonic() > deadline:
                raise OutOfTime
            own.write(shard(prompt.id), traced(bench, prompt))

    def measured() -> Prompts:
        own = store(bench).shards
        return Prompts([prompt for prompt in bench.prompts.every if shard(prompt.id) in own])

    return Work("labels", seconds, run, measured)


def shard(prompt: str) -> str:
    return f"traces-{prompt}.parquet"


def traced(bench: Bench, prompt) -> dict[str, list | Tensor]:
    """The columns of one prompt's roots under all settings.

    Under each setting the target writes a text of its own.
    """
    (target, draft), own, parts = bench.models, config(bench), []
    for number, name in enumerate(EIGHT):
        texts = TransformersEngine(target).sample(
            [prompt.tokens], SETTINGS[name], own.new_tokens, number
        )
        seed, batch = number, MicroBatch(own.micro_batch)
        parts.append(
            trace_trajectories(target, draft, [prompt], texts, [SETTINGS[name]], own, batch, seed)
        )
    parts = [part for part in parts if part]
    joined = {name: [part[name] for part in parts] for name in (parts[0] if parts else ())}
    return {
        name: (
            torch.cat(own)
            if isinstance(own[0], Tensor)
            else [value for part in own for value in part]
        )
        for name, own in joined.items()
    }


@dataclass
class Labels:
    """Labelled roots of prompts, and the prices of trees.

    Attributes:
        roots: R roots with the labels of all rules.
        row: [R], the prompt of each, as a row of `prompts`.
    """

    roots: Roots
    row: np.ndarray
    prompts: Prompts
    table: LatencyTable
    _sums: dict = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, bench: Bench) -> Labels | None:
        """Those measured so far; None if there are none."""
        own, prompts = store(bench), tracing(bench).prompts()
        return (
            cls._read(own.read("test"), prompts, bench.table)
            if prompts.every and own.roots
            else None
        )

    @classmethod
    def of_traces(cls, bench: Bench) -> Labels | None:
        """Those that the run's selectors are trained on, for comparisons without a selector: more
        prompts, under the settings that the run traced.

        Those of `of` where the run has none, or not of all rules.
        """
        folder = bench.run / "traces"
        columns = TraceStore(folder).read("train") if (folder / INDEX).exists() else {}
        if not set(LABELLED) <= set(columns):
            return cls.of(bench)
        here = set(columns["prompt_id"].tolist())
        return cls._read(
            columns,
            Prompts.in_turn(p for p in bench.pair.every_prompt() if p.id in here),
            bench.table,
        )

    @classmethod
    def _read(cls, columns: dict[str, np.ndarray], prompts: Prompts, table: LatencyTable) -> Labels:
        here = np.isin(columns["prompt_id"], [prompt.id for prompt in prompts.every])
        columns = {name: column[here] for name, column in columns.items()}
        rows = np.array([prompts.row[prompt] for prompt in columns["prompt_id"]])
        return cls(roots_from_traces(columns, LABELLED, lambda _: None), rows, prompts, table)

    def __str__(self) -> str:
        """ "On 6 prompts (code 3, prose 3), settings t0.6, t1.0"."""
        here = [
            name
            for name in EIGHT
            if (SETTINGS[name].temperature, SETTINGS[name].top_p) in self._settings
        ]
        return f"On {self.prompts}, settings {'all eight' if len(here) == 8 else ', '.join(here)}"

    @property
    def _settings(self) -> list[tuple[float, float]]:
        return [
            (round(temperature, 4), round(top_p, 4)) for temperature, top_p in self.roots.settings
        ]

    def figure(
        self,
        rule: str,
        setting: str,
        trees: list[int] | Tensor,
        of: str = TOKENS,
        kind: str | None = None,
    ) -> Samples | None:
        """TOKENS or SPEED of a rule with each of some trees under one setting, on one set of
        prompts or all.

        Roots lie at equal distances in a text, and a decoder starts more steps where a step commits
        less. So a root counts w = 1 / label, and the figure is sum(w label) / sum(w), or sum(w
        label) / sum(w seconds). The label in w is that of other super-trees than the one that is
        counted. With the same ones the figure would be 1 / mean(1 / label), which is too low where
        labels are noisy.

        Args:
            rule: any of `nde_talf.decoding.names.LABELLED` or ON_PATHS.
            trees: indices into TREES, of n trees that are each taken at all roots; or [R], the tree
                taken at every root.

        Returns:
            [1 + RESAMPLES, n], or [1 + RESAMPLES] for a tree of every root; None without roots.
        """
        if kind is not None and kind not in self.prompts.sets:
            return None
        chosen = isinstance(trees, Tensor)
        above, below = self._by_prompt(rule, setting, of, trees if chosen else None)
        if not chosen:
            above, below = above[:, trees], below[:, trees]
        found = self.prompts.ratio(above, below, kind)
        return None if not np.isfinite(found[0]).all() else found[:, 0] if chosen else found

    def best(
        self, rule: str, setting: str, trees: list[int], of: str, kind: str | None = None
    ) -> int | None:
        """The tree with the highest figure."""
        found = self.figure(rule, setting, trees, of, kind)
        return None if found is None else trees[int(found[0].argmax())]

    def best_figure(
        self, rule: str, setting: str, trees: list[int], of: str, kind: str | None = None
    ) -> Samples | None:
        """The figure of the best tree, chosen on the same roots, as the papers do."""
        best = self.best(rule, setting, trees, of, kind)
        return None if best is None else self.figure(rule, setting, [best], of, kind)[:, 0]

    def crossed(self, rule: str, setting: str, trees: list[int], of: str) -> Samples | None:
        """The figure of the best tree, chosen on one half of the prompts and measured on the other,
        and the other way round, so that a longer list of trees is not better by choosing alone.

        On all sets together.
        """
        above, below = self._by_prompt(rule, setting, of, None)
        if not below.any():
            return None
        fold = np.arange(len(above)) // len(self.prompts.sets) % 2
        taken = np.zeros((2, len(above)))
        for own in (0, 1):
            if (fold != own).any():
                sums = [values[fold != own][:, trees].sum(0) for values in (above, below)]
                best = trees[int((sums[0] / sums[1]).argmax())]
                taken[:, fold == own] = above[fold == own, best], below[fold == own, best]
        found = self.prompts.ratio(*taken)
        return found if np.isfinite(found[0]) else None

    def _by_prompt(
        self, rule: str, setting: str, of: str, taken: Tensor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weighted tokens, and steps or seconds, of the roots under a setting, summed by prompt:
        [prompts, 233] each, or [prompts, 1] of trees `taken` [R].
        """
        rule = ON_PATHS.get(rule, rule)
        key = rule, setting, of
        if taken is None and key in self._sums:
            return self._sums[key]
        wanted = SETTINGS[setting].temperature, SETTINGS[setting].top_p
        index = [i for i, pair in enumerate(self._settings) if pair == wanted]
        here = torch.isin(self.roots.setting, torch.tensor(index)).nonzero()[:, 0]
        labels = self.roots.samples[rule][here].double()
        one, other = labels[:, ::2].mean(1), labels[:, 1::2].mean(1)
        price = (
            StepCosts(self.table, [rule], int(self.roots.context.max())).at(
                self.roots.context[here]
            )[0]
            if of == SPEED
            else 1.0
        )
        values = one / other + other / one, (1 / one + 1 / other) * price
        if taken is not None:
            values = tuple(own.gather(1, taken[here][:, None]) for own in values)
        sums = np.zeros((2, len(self.prompts.every), values[0].shape[1]))
        for own, value in zip(sums, values, strict=True):
            np.add.at(own, self.row[here.numpy()], value.numpy())
        if taken is None:
            self._sums[key] = sums[0], sums[1]
        return sums[0], sums[1]


def unpriced(table: LatencyTable) -> list[str]:
    """A note where the latency table does not know what a rule takes, so that the rule is priced as
    if it took nothing.
    """
    missing = [rule for rule in LABELLED if rule not in table.verify]
    return [f"The latency table prices no verification by {', '.join(missing)}."] if missing else []
