"""Offline evaluation of a selector: throughput on held-out roots against static actions, cheap
rules and what choosing could win at most.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.common.bootstrap import ratio_of_totals, sums_by_prompt
from nde_talf.decoding.device import upload
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.features import draft_rows
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.network import Selector, action_at
from nde_talf.selector.objective import best_static, mean_step, split_half_choice, taken
from nde_talf.selector.roots import ROOT_SCALARS, PricedRoots, setting_title

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
        q = draft_rows(drafter)[1]
        chosen = int(self._bins(-torch.xlogy(q, q).sum(-1, keepdim=True)))
        return draft_delayed(self.chosen_trees[chosen], state, drafter, rng)

    def _bins(self, entropy: Tensor) -> Tensor:
        return torch.bucketize(
            entropy.contiguous(), upload(torch.tensor(self.edges), entropy.device)
        )


TAIL = 0.05
SHAPES = torch.tensor(TREES, dtype=torch.float32)


def evaluate_offline(
    selector: Selector,
    training: PricedRoots,
    validation: PricedRoots,
    table: int,
    reference: tuple[PricedRoots, PricedRoots] | None = None,
    seen: PricedRoots | None = None,
) -> dict:
    """Held-out figures under one latency table, for each sampling setting and over all of them.

    Throughputs are 1 over the mean of the estimated seconds per token
    (`nde_talf.selector.objective.best_static` says why). Ratios are to the best static action of
    the setting (chosen on the training roots), each [value, low, high] with 95 % bootstrap
    intervals over prompts:

    - selector: its most probable action; selector_expected: the mean over its policy.
    - static_l1_0, static_domain: the best static trees with L1 = 0, and by domain.
    - entropy_rule: the rule on the draft's entropy.
    - split_half: chooses root by root on one half of the super-trees and scores on the other, an
      underestimate of what choosing can win, since labels are noisy; same_half: chooses and scores
      on the same labels, an overestimate.
    - traversal_static: the `reference`'s best static action.
    - over_domain: the selector's throughput to static_domain's.

    Args:
        selector: in evaluation mode.
        training: the roots that the baselines are fitted on.
        validation: the roots that count.
        table: index of the latency table.
        reference: Traversal's training and validation roots.
        seen: the validation roots as the selector sees them, where its prices are not those that
            count.
    """
    roots, static = validation.roots, training.static()[table]
    without_trunk = torch.tensor([tree.l1 == 0 for tree in TREES]).repeat(len(training.verifiers))
    efficiency, seconds = validation.efficiency, validation.priced(table)[1]
    policy = probabilities(selector, seen or validation, table)
    chosen = policy.argmax(-1)
    actions = {
        "static": static[roots.setting],
        "selector": chosen,
        "static_l1_0": training.static(without_trunk)[table][roots.setting],
        "static_domain": static_by_domain(training, validation, table),
        "same_half": (efficiency / seconds).argmax(-1),
    }
    if len(training.verifiers) == 1:
        actions["entropy_rule"] = by_entropy(training, validation, table)
    paces = {name: validation.pace(action, table) for name, action in actions.items()}
    paces["selector_expected"] = (policy * seconds).sum(-1) / (policy * efficiency).sum(-1)
    tokens, times = split_half_choice(validation.samples, seconds)
    paces["split_half"] = (times / tokens).view(2, -1).mean(0)
    if reference is not None:
        paces["traversal_static"] = reference[1].pace(
            reference[0].static()[table][roots.setting], table
        )
    committed = {name: taken(efficiency, actions[name]) for name in ("static", "selector")}
    settings = {}
    for index, setting in enumerate(roots.settings):
        here = roots.setting == index
        if here.any():
            settings[setting_title(setting)] = {
                "roots": int(here.sum()),
                "learned": selector.schema.learned[selector.schema.settings.index(setting)],
                "static": _named(int(static[index]), validation),
                "by_entropy": _by_entropy(chosen[here], roots.scalars[here, ENTROPY]),
                "by_domain": _by_domain(training, validation, table, index, actions, paces),
                **_compare(paces, committed, roots.prompt, here),
            }
    counts = sorted(enumerate(chosen.bincount().tolist()), key=lambda pair: -pair[1])
    return {
        "settings": settings,
        "all": _compare(paces, committed, roots.prompt, torch.ones(len(roots), dtype=torch.bool)),
        "by_entropy": _by_entropy(chosen, roots.scalars[:, ENTROPY]),
        "chosen": {str(_named(action, validation)): count for action, count in counts if count},
        "training_roots": len(training),
        "validation_roots": len(validation),
    }


@torch.inference_mode()
def probabilities(selector: Selector, roots: PricedRoots, table: int) -> Tensor:
    """Pi [R, C] of a selector, in evaluation mode, under one latency table: softmax of its logits,
    or all on the best static action under settings for which that was exported.
    """
    policy = roots.logits(selector, table).softmax(-1)
    for index, setting in enumerate(roots.roots.settings):
        action = selector.static_action(*setting, roots.costs[table])
        if action is not None:
            policy[roots.roots.setting == index] = one_hot(
                torch.tensor(action), policy.shape[-1]
            ).to(policy)
    return policy


def _named(index: int, roots: PricedRoots) -> list:
    name, tree = action_at(index, roots.verifiers)
    return [*tree] if len(roots.verifiers) == 1 else [name, *tree]


def _by_entropy(chosen: Tensor, entropy: Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Mean shape of the chosen trees by the draft's entropy at the root, in bins of equally many
    roots.
    """
    k, l1, l2 = SHAPES[chosen % len(TREES)].unbind(-1)
    columns = {"entropy": entropy, "depth": l1 + l2, "trunk": l1, "nodes": l1 + k * l2}
    groups = [group for group in entropy.argsort().tensor_split(bins) if len(group)]
    return [
        {name: float(column[group].mean()) for name, column in columns.items()} for group in groups
    ]


def _by_domain(
    training: PricedRoots,
    validation: PricedRoots,
    table: int,
    setting: int,
    actions: dict[str, Tensor],
    paces: dict[str, Tensor],
) -> dict[str, dict]:
    """Where contexts differ: of every kind of prompt, validation roots, the best static tree of its
    own training roots (None where they are few), tokens a step with the setting's best static tree,
    and tokens/s over that one's, with its own tree and with the selector.
    """
    best, found = best_by_domain(training, table, setting), {}
    for kind in sorted(set(validation.roots.kind)):
        alike = torch.tensor([k == kind for k in validation.roots.kind]) & (
            validation.roots.setting == setting
        )
        if alike.any():
            static = paces["static"][alike].mean()
            found[kind] = {
                "roots": int(alike.sum()),
                "tree": _named(best[kind], validation) if kind in best else None,
                "tokens": mean_step(
                    taken(validation.efficiency, actions["static"])[alike],
                    torch.ones(int(alike.sum())),
                )[0],
                "own_tree": float(static / paces["static_domain"][alike].mean()),
                "selector": float(static / paces["selector"][alike].mean()),
            }
    return found


def _compare(
    paces: dict[str, Tensor], committed: dict[str, Tensor], prompt: Tensor, here: Tensor
) -> dict:
    """Ratios of total throughput of the roots `here` [R] to the static action's, each [value, low,
    high].

    Args:
        paces: by method, seconds per token [R].
        committed: of "static" and "selector", tokens a step [R].
    """
    own = {name: pace[here] for name, pace in paces.items()}
    one = torch.ones_like(own["static"])

    def ratio(name: str, base: str = "static") -> list[float]:
        columns = torch.stack([one, own[name], one, own[base]], -1).double()
        return ratio_of_totals(sums_by_prompt(columns.numpy(), prompt[here].numpy()))

    per_root = own["static"] / own["selector"]
    worst = per_root.sort().values[: max(1, round(TAIL * len(per_root)))]
    return {
        "static_tps": float(1 / own["static"].mean()),
        **{
            f"{name}_block_efficiency": mean_step(tokens[here], one)[0]
            for name, tokens in committed.items()
        },
        **{name: ratio(name) for name in own if name != "static"},
        "over_domain": ratio("selector", "static_domain"),
        "worst_5_percent": float(worst.mean()),
        "worst_quantiles": per_root.quantile(torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75])).tolist(),
    }
