"""What a selector chooses among at labelled roots: options (verifier, tree) with E[tau + 1] and, under each latency table,
seconds. Pure tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from decoding.actions import TREES, Action
from decoding.common.errors import UserError
from decoding.verification import VERIFIERS, Verifier, verifier
from selector.latency import LatencyTable, StepCosts
from selector.objective import best_static
from selector.roots import ROOT_SCALARS, Roots, setting_title

# The scalar inputs of the selector, in order: those of the root, then seconds of a one-token pass at its context.
INPUT_SCALARS = (*ROOT_SCALARS, "t_draft", "t_target")


def selectable(names: Sequence[str], where: str) -> list[Verifier]:
    """The rules called `names`, among which a selector may choose. Raises UserError, naming the key or file `where`, for one
    that is not lossless on every delayed tree at every temperature: a selector drafts these, whichever rule it chooses."""
    fitting = [name for name, rule in VERIFIERS.items() if "delayed" in rule.trees and name != "greedy"]
    if not names:
        raise UserError(f"{where}: it names no verifier; choose from {', '.join(fitting)}.")
    for name in names:
        if name not in fitting:
            why = "there is none of that name"
            if name in VERIFIERS:
                why = f"it takes trees of kind {', '.join(sorted(verifier(name).trees))}, but a selector drafts 'delayed' trees"
            if name == "greedy":
                why = "it is lossless at temperature 0 only, where every rule decodes greedily"
            raise UserError(f"{where}: a selector cannot choose {name}: {why}. Choose from {', '.join(fitting)}.")
    return [VERIFIERS[name] for name in names]


def option(index: int, verifiers: Sequence[str]) -> tuple[str, Action]:
    """The verifier and the tree of option `index`, in 0 .. len(verifiers) x 233 - 1."""
    return verifiers[index // len(TREES)], TREES[index % len(TREES)]


@dataclass
class Choices:
    """Options of R roots: C = verifiers x 233. costs: one for each latency table."""

    roots: Roots
    verifiers: tuple[str, ...]
    costs: list[StepCosts]

    @classmethod
    def of(cls, roots: Roots, verifiers: Sequence[str], tables: Sequence[LatencyTable], rule: str = "table") -> "Choices":
        longest = int(roots.context.max())
        return cls(roots, tuple(verifiers), [StepCosts(table, verifiers, longest, rule) for table in tables])

    def __len__(self) -> int:
        return len(self.roots)

    @cached_property
    def efficiency(self) -> Tensor:
        """[R, C]: the labels, means over the super-trees."""
        return torch.cat([self.roots.samples[name].mean(1) for name in self.verifiers], -1)

    @cached_property
    def samples(self) -> Tensor:
        """[R, s, C]."""
        return torch.cat([self.roots.samples[name] for name in self.verifiers], -1)

    def priced(self, table: int, index: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs [B, 11] (INPUT_SCALARS) and seconds [B, C] of the roots `index` under one latency table."""
        seconds, passes = self.costs[table].at(self.roots.context[index])
        return torch.cat([self.roots.scalars[index], passes], -1), seconds

    def where(self, chosen: Tensor) -> "Choices":
        """Those of the roots with `chosen` [R] True, or at these indices."""
        return replace(self, roots=self.roots.where(chosen))

    def static(self, allowed: Tensor | None = None) -> Tensor:
        """The option that is best used throughout, for each table and sampling setting: [M, settings]; `allowed` [C] restricts
        it. Raises UserError for a setting without roots."""
        best = torch.zeros(len(self.costs), len(self.roots.settings), dtype=torch.long)
        for setting, pair in enumerate(self.roots.settings):
            index = (self.roots.setting == setting).nonzero()[:, 0]
            if not len(index):
                raise UserError(f"the traces hold no training roots for {setting_title(pair)}.")
            for table in range(len(self.costs)):
                best[table, setting] = best_static(self.efficiency[index], self.priced(table, index)[1], allowed)
        return best
