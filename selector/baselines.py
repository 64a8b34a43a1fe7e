"""Rules that a selector has to beat: the best static option, the best one of each domain, and a rule on the draft's entropy.

Each is fitted on training roots and gives an option for every root. Pure tensors; `EntropyRule` is also a `TreePolicy`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.actions import TREES, Action
from decoding.device import upload
from decoding.device_tree import DeviceTree
from decoding.drafter import Drafter
from decoding.policies.base import DecodingState, Outlook
from decoding.policies.delayed import draft_delayed
from decoding.sampling import Rng
from decoding.tree import DraftTree
from selector.choices import Choices
from selector.objective import best_static
from selector.roots import ROOT_SCALARS

ENTROPY = ROOT_SCALARS.index("entropy_q_root")
BINS = 6
LEAST = 30  # roots that a group needs for a choice of its own


def static_by_domain(training: Choices, validation: Choices, table: int) -> Tensor:
    """[R] options: the best static one of each sampling setting and kind of prompt; of the setting where a kind has too few
    training roots."""
    fallback = training.static()[table].tolist()
    best = [best_by_domain(training, table, setting) for setting in range(len(training.roots.settings))]
    roots = validation.roots
    return torch.tensor([best[s].get(k, fallback[s]) for s, k in zip(roots.setting.tolist(), roots.kind, strict=True)])


def best_by_domain(training: Choices, table: int, setting: int) -> dict[str, int]:
    """The best static option of every kind of prompt with roots enough under a setting."""
    best = {}
    for kind in sorted(set(training.roots.kind)):
        alike = torch.tensor([k == kind for k in training.roots.kind])
        own = (alike & (training.roots.setting == setting)).nonzero()[:, 0]
        if len(own) >= LEAST:
            best[kind] = best_static(training.efficiency[own], training.priced(table, own)[1])
    return best


@dataclass(frozen=True)
class EntropyRule:
    """The best tree by the draft's entropy at the root alone. edges [bins - 1] in nats; trees [bins]."""

    edges: list[float]
    chosen_trees: list[Action]
    trees = "delayed"

    @classmethod
    def fit(cls, training: Choices, table: int, setting: int) -> "EntropyRule":
        """Bins of equally many training roots of one setting, each with its best static tree."""
        own = (training.roots.setting == setting).nonzero()[:, 0]
        entropy = training.roots.scalars[own, ENTROPY]
        bins = max(1, min(BINS, len(own) // LEAST))
        edges = entropy.quantile(torch.arange(1, bins) / bins) if bins > 1 else entropy.new_zeros(0)
        index = torch.bucketize(entropy, edges)
        best = []
        for b in range(bins):
            here = own[index == b]
            here = here if len(here) else own
            best.append(TREES[best_static(training.efficiency[here], training.priced(table, here)[1]) % len(TREES)])
        return cls(edges.tolist(), best)

    def choose(self, entropy: Tensor) -> Tensor:
        """Indices into TREES [R] at roots with this entropy [R]."""
        return torch.tensor([TREES.index(tree) for tree in self.chosen_trees])[self._bins(entropy)]

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | DeviceTree:
        chosen = int(self.choice(None, drafter)) if state.choice is None else state.choice
        return draft_delayed(self.chosen_trees[chosen], state, drafter, rng)

    def choice(self, outlook: Outlook | None, drafter: Drafter) -> Tensor:
        """See `Chooser.choice`: index [1] of a bin, by the draft alone."""
        q = drafter.root.q
        return self._bins(-torch.xlogy(q, q).sum(-1, keepdim=True))

    def _bins(self, entropy: Tensor) -> Tensor:
        return torch.bucketize(entropy.contiguous(), upload(torch.tensor(self.edges), entropy.device))
