"""Rules that a selector has to beat: the best static action, the best one of each domain, and a
rule on the draft's entropy.

Each is fitted on training roots and gives an action for every root. `EntropyRule` is also a
`TreePolicy`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.device import upload
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.features import draft_rows
from nde_talf.decoding.policies.base import DecodingState, Outlook, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.objective import best_static
from nde_talf.selector.roots import ROOT_SCALARS, PricedRoots

ENTROPY = ROOT_SCALARS.index("entropy_q_root")
BINS = 6
MIN_ROOTS = 30  # that a group needs for an action of its own


def static_by_domain(training: PricedRoots, validation: PricedRoots, table: int) -> Tensor:
    """[R]: the best static action of each sampling setting and kind of prompt; that of the setting
    where a kind has too few training roots.
    """
    fallback = training.static()[table].tolist()
    best = [
        best_by_domain(training, table, setting) for setting in range(len(training.roots.settings))
    ]
    roots = validation.roots
    return torch.tensor(
        [
            best[s].get(k, fallback[s])
            for s, k in zip(roots.setting.tolist(), roots.kind, strict=True)
        ]
    )


def best_by_domain(training: PricedRoots, table: int, setting: int) -> dict[str, int]:
    """The best static action of every kind of prompt that has enough roots under a setting."""
    best = {}
    for kind in sorted(set(training.roots.kind)):
        alike = torch.tensor([k == kind for k in training.roots.kind])
        own = (alike & (training.roots.setting == setting)).nonzero()[:, 0]
        if len(own) >= MIN_ROOTS:
            best[kind] = best_static(training.labels(own), training.priced(table, own)[1])
    return best


def by_entropy(training: PricedRoots, validation: PricedRoots, table: int) -> Tensor:
    """[R]: the actions of the `EntropyRule` of each sampling setting, for a selector of one
    verifier.
    """
    chosen = torch.zeros(len(validation), dtype=torch.long)
    for setting in range(len(training.roots.settings)):
        here = validation.roots.setting == setting
        chosen[here] = EntropyRule.fit(training, table, setting).choose(
            validation.roots.scalars[here, ENTROPY]
        )
    return chosen


@dataclass(frozen=True)
class EntropyRule(TreePolicy):
    """The best tree by the draft's entropy at the root alone. edges [bins - 1] in nats;
    chosen_trees [bins].
    """

    edges: list[float]
    chosen_trees: list[Action]
    trees = "delayed"

    @classmethod
    def fit(cls, training: PricedRoots, table: int, setting: int) -> "EntropyRule":
        """Bins of equally many training roots of one setting, each with its best static tree."""
        own = (training.roots.setting == setting).nonzero()[:, 0]
        entropy = training.roots.scalars[own, ENTROPY]
        bins = max(1, min(BINS, len(own) // MIN_ROOTS))
        edges = entropy.quantile(torch.arange(1, bins) / bins) if bins > 1 else entropy.new_zeros(0)
        index = torch.bucketize(entropy, edges)
        best = []
        for b in range(bins):
            here = own[index == b] if (index == b).any() else own
            best.append(
                TREES[
                    best_static(training.labels(here), training.priced(table, here)[1]) % len(TREES)
                ]
            )
        return cls(edges.tolist(), best)

    def choose(self, entropy: Tensor) -> Tensor:
        """Indices into TREES [R] at roots with this entropy [R]."""
        return torch.tensor([TREES.index(tree) for tree in self.chosen_trees])[self._bins(entropy)]

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | DeviceTree:
        chosen = int(self.choice(None, drafter)) if state.choice is None else state.choice
        return draft_delayed(self.chosen_trees[chosen], state, drafter, rng)

    def choice(self, outlook: Outlook | None, drafter: Drafter) -> Tensor:
        """See `Chooser.choice`: index [1] of a bin, by the draft alone."""
        q = draft_rows(drafter)[1]
        return self._bins(-torch.xlogy(q, q).sum(-1, keepdim=True))

    def _bins(self, entropy: Tensor) -> Tensor:
        return torch.bucketize(
            entropy.contiguous(), upload(torch.tensor(self.edges), entropy.device)
        )
