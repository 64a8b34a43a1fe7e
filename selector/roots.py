"""Labelled roots and the prices of actions at them: a selector's training data.

A root is a position of a traced text at which a draft tree could start. `Roots` holds the traces of
R roots, independent of the machine; `PricedRoots` adds latency tables and so every action's
seconds. Pure tensors.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.bootstrap import ratio_of_totals, sums_by_prompt
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.features import SCALARS
from nde_talf.selector.objective import taken
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.step_costs import StepCosts, context_counts

ROOT_SCALARS = (*SCALARS, "context", "temperature", "top_p")
"""Scalars of a root, in order, without the machine's prices.

Units: nats (entropies, divergences), probability (l1), tokens (context).
"""
INPUT_SCALARS = (*ROOT_SCALARS, "t_draft", "t_target")
"""Scalar inputs of the selector, in order: the root's, then seconds of one-token passes."""
FEW_ROOTS = 50
EVERY_TREE = torch.ones(len(TREES), dtype=torch.bool)
PART = 8192
"""Roots whose hidden states are in memory at once."""


@dataclass
class Roots:
    """R labelled roots.

    Attributes:
        h_p_previous: [R, H_p], the target's hidden state at the token before the root.
        h_q_previous: [R, H_q], the draft's there.
        h_q_root: [R, H_q], the draft's at the root.
        scalars: [R, 9], ROOT_SCALARS in their units.
        context: [R], committed tokens.
        setting: [R], index into `settings`.
        prompt: [R], number of a root's prompt.
        samples: labels by verifier, [R, s, A]: E[tau + 1] of every tree, estimated from each of s
            super-trees.
        settings: (temperature, top-p).
        kind: domain of each root's prompt.
    """

    h_p_previous: Tensor
    h_q_previous: Tensor
    h_q_root: Tensor
    scalars: Tensor
    context: Tensor
    setting: Tensor
    prompt: Tensor
    samples: dict[str, Tensor]
    settings: list[tuple[float, float]]
    kind: list[str]

    def __len__(self) -> int:
        return len(self.scalars)

    def where(self, chosen: Tensor) -> "Roots":
        """Return the roots with `chosen` [R] True, or at these indices."""
        index = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        tensors: Any = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        samples = {name: labels[index] for name, labels in self.samples.items()}
        kind = [self.kind[i] for i in index.tolist()]
        return replace(self, **tensors, samples=samples, kind=kind)


@dataclass
class PricedRoots:
    """R roots with labels and costs of the C = 233 trees under a verifier.

    Attributes:
        costs: of the trees, by a latency table.
    """

    roots: Roots
    verifier: str
    costs: StepCosts

    @classmethod
    def of(
        cls,
        roots: Roots,
        verifier: str,
        table: LatencyTable,
        rule: str = "table",
    ) -> "PricedRoots":
        """Price `roots` by a latency table; rule: see `StepCosts`."""
        return cls(roots, verifier, StepCosts(table, verifier, int(roots.context.max()), rule))

    def __len__(self) -> int:
        return len(self.roots)

    @cached_property
    def efficiency(self) -> Tensor:
        """Labels [R, A], means over the super-trees."""
        return self.roots.samples[self.verifier].mean(1)

    def inputs(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return INPUT_SCALARS [B, 11] of the roots `index`."""
        costs, roots = self.costs, self.roots
        return torch.cat([roots.scalars[index], costs.passes[costs.row(roots.context[index])]], -1)

    def seconds(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return seconds of a step [B, A] at the roots `index`."""
        return self.costs.at(self.roots.context[index])

    def logits(self, selector: Callable[..., Tensor], index: Tensor | None = None) -> Tensor:
        """Return a selector's logits [B, A] at the roots `index`; None for all."""
        index = torch.arange(len(self)) if index is None else index
        roots = self.roots
        states = roots.h_p_previous, roots.h_q_previous, roots.h_q_root
        parts = [
            selector(
                *(h[i].float() for h in states),
                self.inputs(i),
                self.seconds(i),
            )
            for i in index.split(PART)
        ]
        return torch.cat(parts)

    def pace(self, action: Tensor) -> Tensor:
        """Return seconds per token [R] at every root with its `action` [R].

        The mean over roots equals the mean over a text: see
        `nde_talf.selector.objective.best_static`.
        """
        seconds = self.costs.seconds[self.costs.row(self.roots.context), action]
        return seconds / taken(self.efficiency, action)

    def mean_tokens(self, index: Tensor) -> Tensor:
        """Return tokens per step [A] over the texts of the roots `index`: 1 / mean(1 / labels)."""
        inverse = ((1 / self.efficiency[some].double()).sum(0) for some in index.split(PART))
        return len(index) / torch.stack([*inverse]).sum(0)

    def mean_paces(self, index: Tensor) -> Tensor:
        """Return seconds per token [A] over the texts of the roots `index`."""
        counts = context_counts(self.roots.context[index])
        return self.costs.mean(counts) / self.mean_tokens(index)

    def where(self, chosen: Tensor) -> "PricedRoots":
        """Keep the roots with `chosen` [R] True, or at these indices."""
        return replace(self, roots=self.roots.where(chosen))

    def static(self, allowed: Tensor = EVERY_TREE) -> Tensor:
        """Return the best single action [settings] by sampling setting.

        Raises UserError for a setting without roots.

        Args:
            allowed: [A], the actions to choose from.
        """
        best = []
        for setting, pair in enumerate(self.roots.settings):
            index = (self.roots.setting == setting).nonzero()[:, 0]
            if not len(index):
                raise UserError(f"the traces hold no training roots for {setting_title(pair)}.")
            best.append(self.mean_paces(index).masked_fill(~allowed, torch.inf).argmin(-1))
        return torch.stack(best)


def throughput_gain(pace: Tensor, baseline: Tensor, prompt: Tensor) -> list[float]:
    """Return [ratio, low, high] of tokens/s over a baseline's, a 95 % bootstrap interval.

    Args:
        pace: seconds per token [R].
        baseline: the same of the baseline.
        prompt: [R], resampled as units.
    """
    columns = torch.stack([baseline, pace], -1).double()
    return ratio_of_totals(sums_by_prompt(columns.numpy(), prompt.numpy()))


def setting_title(setting: tuple[float, float]) -> str:
    """Write a (temperature, top-p) pair in words."""
    return f"temperature {setting[0]:g}, top-p {setting[1]:g}"


def roots_from_traces(
    traces: Mapping[str, np.ndarray],
    verifiers: Sequence[str],
) -> Roots:
    """Make the roots of a table of traces with the labels of `verifiers`.

    Warns of every sampling setting with few roots.

    Args:
        traces: columns, as `TraceStore.read` gives them.
        verifiers: rules.

    Raises:
        UserError: labels are missing, or hidden states or labels are not finite.
    """

    def column(name: str) -> Tensor:
        if name not in traces:
            raise UserError(
                f"the traces hold no labels for {name}: add it to traces.verifiers and run"
                " stage=traces force=true."
            )
        if not np.isfinite(traces[name]).all():
            raise UserError(
                f"the traces' {name} holds NaN or infinite values; run stage=traces force=true."
            )
        return torch.from_numpy(traces[name])

    pairs = list(zip(traces["temperature"].tolist(), traces["top_p"].tolist(), strict=True))
    settings, prompts = sorted(set(pairs)), traces["prompt_id"].tolist()
    ids = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    scalars = [torch.from_numpy(traces[name]).float() for name in ROOT_SCALARS]
    for pair in settings:
        if (count := pairs.count(pair)) < FEW_ROOTS:
            warnings.warn(
                f"{setting_title(pair)} has {count} {traces['split'][0]} roots, fewer than"
                f" {FEW_ROOTS}: its best static tree and its figures are mostly noise. Raise"
                " traces.train_prompts / validation_prompts, or lower traces.stride.",
                Advice,
                stacklevel=2,
            )
    return Roots(
        column("h_p_previous"),
        column("h_q_previous"),
        column("h_q_root"),
        scalars=torch.stack(scalars, -1),
        context=torch.from_numpy(traces["context"]),
        setting=torch.tensor([settings.index(pair) for pair in pairs]),
        prompt=torch.tensor([ids[prompt] for prompt in prompts]),
        samples={verifier: column(verifier) for verifier in verifiers},
        settings=settings,
        kind=traces["kind"].tolist(),
    )
