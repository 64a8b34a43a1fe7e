"""Baseline for selectors: the best tree by the draft's entropy at the root."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.objective import best_static
from nde_talf.selector.roots import ROOT_SCALARS, PricedRoots

ENTROPY = ROOT_SCALARS.index("entropy_q_root")
BINS = 6
MIN_ROOTS = 30  # least roots of a group with a tree of its own


@dataclass(frozen=True)
class EntropyRule(TreePolicy):
    """Chooses a tree by the draft's entropy at the root.

    edges [bins - 1] in nats; chosen_trees [bins].
    """

    edges: list[float]
    chosen_trees: list[Action]
    trees = "delayed"

    @classmethod
    def fit(cls, training: PricedRoots, setting: int) -> "EntropyRule":
        """Split training roots of one setting into equal bins, and find each bin's best tree."""
        here = (training.roots.setting == setting).nonzero()[:, 0]
        entropy = training.roots.scalars[here, ENTROPY]
        bins = max(1, min(BINS, len(here) // MIN_ROOTS))
        edges = entropy.quantile(torch.arange(1, bins) / bins) if bins > 1 else entropy.new_zeros(0)
        index = torch.bucketize(entropy, edges)
        best = []
        for b in range(bins):
            roots = here[index == b] if (index == b).any() else here
            action = best_static(training.efficiency[roots], training.seconds(roots))
            best.append(TREES[action])
        return cls(edges.tolist(), best)

    def choose(self, entropy: Tensor) -> Tensor:
        """Return indices into TREES [R] for roots of this entropy [R]."""
        trees = torch.tensor([TREES.index(tree) for tree in self.chosen_trees])
        return trees[torch.bucketize(entropy.contiguous(), torch.tensor(self.edges))]

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft the tree of the entropy at the root."""
        q = drafter.seen()[1]
        index = self.choose(-torch.xlogy(q, q).sum(-1, keepdim=True).cpu())
        return draft_delayed(TREES[int(index)], state, drafter, rng)
