"""Offline evaluation of a selector: throughput on held-out roots against rules that it has to beat.

These are the best static action, the best one of each domain, and a rule on the draft's entropy,
each fitted on training roots; and what choosing could win at most.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.network import Selector, action_at
from nde_talf.selector.objective import best_static, split_half_choice
from nde_talf.selector.roots import ROOT_SCALARS, PricedRoots, setting_title, throughput_gain

ENTROPY = ROOT_SCALARS.index("entropy_q_root")
BINS = 6
MIN_ROOTS = 30  # that a group needs for an action of its own


@dataclass(frozen=True)
class EntropyRule(TreePolicy):
    """The best tree by the draft's entropy at the root alone.

    edges [bins - 1] in nats; chosen_trees [bins].
    """

    edges: list[float]
    chosen_trees: list[Action]
    trees = "delayed"

    @classmethod
    def fit(cls, training: PricedRoots, table: int, setting: int) -> "EntropyRule":
        """Take bins of equally many training roots of one setting, each with its best tree."""
        here = (training.roots.setting == setting).nonzero()[:, 0]
        entropy = training.roots.scalars[here, ENTROPY]
        bins = max(1, min(BINS, len(here) // MIN_ROOTS))
        edges = entropy.quantile(torch.arange(1, bins) / bins) if bins > 1 else entropy.new_zeros(0)
        index = torch.bucketize(entropy, edges)
        best = []
        for b in range(bins):
            roots = here[index == b] if (index == b).any() else here
            action = best_static(training.labels(roots), training.priced(table, roots)[1])
            best.append(TREES[action % len(TREES)])
        return cls(edges.tolist(), best)

    def choose(self, entropy: Tensor) -> Tensor:
        """Indices into TREES [R] at roots with this entropy [R]."""
        trees = torch.tensor([TREES.index(tree) for tree in self.chosen_trees])
        return trees[torch.bucketize(entropy.contiguous(), torch.tensor(self.edges))]

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | DeviceTree:
        """Draft the tree of the entropy at the root."""
        q = drafter.seen()[1]
        index = self.choose(-torch.xlogy(q, q).sum(-1, keepdim=True).cpu())
        return draft_delayed(TREES[int(index)], state, drafter, rng)


def by_entropy(training: PricedRoots, validation: PricedRoots, table: int) -> Tensor:
    """[R]: the actions of the `EntropyRule` of each setting, for a selector of one verifier."""
    chosen = torch.zeros(len(validation), dtype=torch.long)
    for setting in range(len(training.roots.settings)):
        here = validation.roots.setting == setting
        rule = EntropyRule.fit(training, table, setting)
        chosen[here] = rule.choose(validation.roots.scalars[here, ENTROPY])
    return chosen


def best_by_domain(training: PricedRoots, table: int, setting: int) -> dict[str, int]:
    """Best static action of every kind of prompt that has enough roots under a setting."""
    best = {}
    for kind in sorted(set(training.roots.kind)):
        alike = torch.tensor([k == kind for k in training.roots.kind])
        roots = (alike & (training.roots.setting == setting)).nonzero()[:, 0]
        if len(roots) >= MIN_ROOTS:
            best[kind] = best_static(training.labels(roots), training.priced(table, roots)[1])
    return best


def static_by_domain(training: PricedRoots, validation: PricedRoots, table: int) -> Tensor:
    """[R]: the best static action of each sampling setting and kind of prompt.

    Where a kind has too few training roots, that of the setting.
    """
    fallback, roots = training.static()[table].tolist(), validation.roots
    settings = range(len(training.roots.settings))
    best = [best_by_domain(training, table, setting) for setting in settings]
    pairs = zip(roots.setting.tolist(), roots.kind, strict=True)
    return torch.tensor([best[setting].get(kind, fallback[setting]) for setting, kind in pairs])


@torch.inference_mode()
def chosen_actions(selector: Selector, roots: PricedRoots, table: int) -> Tensor:
    """[R]: a selector's choices, in evaluation mode, under one latency table.

    The most probable actions, or the best static one under settings for which that was exported.
    """
    actions = roots.logits(selector, table).argmax(-1)
    for index, setting in enumerate(roots.roots.settings):
        static = selector.static_action(*setting, roots.costs[table])
        if static is not None:
            actions[roots.roots.setting == index] = static
    return actions


def evaluate_offline(
    selector: Selector,
    training: PricedRoots,
    validation: PricedRoots,
    table: int,
) -> dict:
    """Compute held-out figures under one latency table, by sampling setting and over all of them.

    Throughputs are 1 over the mean of the estimated seconds per token
    (`nde_talf.selector.objective.best_static` says why). Ratios are to the best static action of
    the setting (chosen on the training roots), each [value, low, high] with 95 % bootstrap
    intervals over prompts:

    - selector: its most probable action.
    - static_l1_0, static_domain: the best static trees with L1 = 0, and by domain.
    - entropy_rule: the rule on the draft's entropy.
    - split_half: chooses root by root on one half of the super-trees and scores on the other, an
      underestimate of what choosing can win, since labels are noisy; same_half: chooses and scores
      on the same labels, an overestimate.

    Args:
        selector: in evaluation mode.
        training: the roots that the baselines are fitted on.
        validation: the roots that count.
        table: index of the latency table.
    """
    roots, static = validation.roots, training.static()[table]
    without_trunk = torch.tensor([tree.l1 == 0 for tree in TREES]).repeat(len(training.verifiers))
    efficiency, seconds = validation.efficiency, validation.priced(table)[1]
    actions = {
        "static": static[roots.setting],
        "selector": chosen_actions(selector, validation, table),
        "static_l1_0": training.static(without_trunk)[table][roots.setting],
        "static_domain": static_by_domain(training, validation, table),
        "same_half": (efficiency / seconds).argmax(-1),
    }
    if len(training.verifiers) == 1:
        actions["entropy_rule"] = by_entropy(training, validation, table)
    paces = {name: validation.pace(action, table) for name, action in actions.items()}
    tokens, times = split_half_choice(validation.samples, seconds)
    paces["split_half"] = (times / tokens).view(2, -1).mean(0)

    def gains(here: Tensor) -> dict[str, list[float]]:
        return {
            name: throughput_gain(pace[here], paces["static"][here], roots.prompt[here])
            for name, pace in paces.items()
            if name != "static"
        }

    settings = {}
    for index, setting in enumerate(roots.settings):
        here = roots.setting == index
        if here.any():
            settings[setting_title(setting)] = {
                "roots": int(here.sum()),
                "learned": selector.schema.learned[selector.schema.settings.index(setting)],
                "static": _named(int(static[index]), validation),
                **gains(here),
            }
    return {"settings": settings, "all": gains(torch.ones(len(roots), dtype=torch.bool))}


def _named(index: int, roots: PricedRoots) -> list:
    name, tree = action_at(index, roots.verifiers)
    return [*tree] if len(roots.verifiers) == 1 else [name, *tree]
