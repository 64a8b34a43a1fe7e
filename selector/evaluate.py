"""Judging a selector offline: throughput on held-out roots against static options, cheap rules and the split-half choice."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from decoding.actions import TREES
from selector.baselines import ENTROPY, EntropyRule, static_by_domain
from selector.choices import Choices, option
from selector.objective import split_half_choice
from selector.resampling import resampling
from selector.roots import setting_title
from selector.selector import Selector

Steps = tuple[Tensor, Tensor]  # tokens and seconds of a step at every root
TAIL = 0.05


def judge(
    selector: Selector,
    training: Choices,
    validation: Choices,
    table: int,
    reference: tuple[Choices, Choices] | None = None,
    seen: Choices | None = None,
) -> dict:
    """Held-out figures under one latency table, for each sampling setting and over all of them.

    Throughputs are sums of estimated tokens over sums of estimated seconds. Ratios are to the best static option of the
    setting (chosen on the training roots), each [value, low, high] with 95 % bootstrap intervals over prompts:
    selector (argmax) and selector_expected (the policy); static_l1_0 and static_domain, the best static trees with L1 = 0 and
    by domain; entropy_rule; split_half, which chooses root by root on one half of the super-trees and scores on the other
    (an underestimate of what choosing can win, since labels are noisy), and same_half, which chooses and scores on the
    same labels (an overestimate); traversal_static where a `reference` (Traversal's training and validation roots) is given.
    over_domain: the selector's (argmax) to static_domain's.
    `seen`: the validation roots as the selector sees them, where its prices are not those that count.
    """
    static = training.static()[table]
    rivals = {
        "static_l1_0": training.static(_rootward(training))[table][validation.roots.setting],
        "static_domain": static_by_domain(training, validation, table),
    }
    if len(training.verifiers) == 1:
        rivals["entropy_rule"] = _entropy_rule(training, validation, table)
    policy = probabilities(selector, seen or validation, table)
    extra = {}
    if reference is not None:
        theirs = reference[0].static()[table][validation.roots.setting]
        extra["traversal_static"] = _picked(theirs, reference[1].efficiency, reference[1].priced(table)[1])
    steps = _all_steps(policy, rivals, static, validation, table) | extra
    compare = partial(_compare, steps, validation.roots.prompt)
    settings, argmax = {}, policy.argmax(-1)
    for index, setting in enumerate(validation.roots.settings):
        chosen = validation.roots.setting == index
        if chosen.any():
            settings[setting_title(setting)] = {
                "roots": int(chosen.sum()),
                "learned": selector.schema.learned[selector.schema.settings.index(setting)],
                "static": _named(int(static[index]), validation),
                "by_entropy": _by_entropy(argmax[chosen], validation.where(chosen)),
                **compare(chosen),
            }
    return {
        "settings": settings,
        "all": compare(torch.ones(len(validation), dtype=torch.bool)),
        "by_entropy": _by_entropy(argmax, validation),
        "chosen": {str(_named(int(i), validation)): int(n) for i, n in _counts(argmax) if n},
        "training_roots": len(training),
        "validation_roots": len(validation),
    }


@torch.inference_mode()
def probabilities(selector: Selector, choices: Choices, table: int) -> Tensor:
    """pi [R, C] of a selector, in evaluation mode, under one latency table: softmax of its logits, or all on the best static
    option under settings for which that was exported."""
    chosen = selector(*choices.roots.states, *choices.priced(table)).softmax(-1)
    for index, setting in enumerate(choices.roots.settings):
        option = selector.static_option(*setting, choices.costs[table])
        if option is not None:
            chosen[choices.roots.setting == index] = one_hot(torch.tensor(option), chosen.shape[-1]).to(chosen)
    return chosen


def _all_steps(policy: Tensor, rivals: dict[str, Tensor], static: Tensor, validation: Choices, table: int) -> dict[str, Steps]:
    efficiency, seconds = validation.efficiency, validation.priced(table)[1]
    picked = partial(_picked, efficiency=efficiency, seconds=seconds)
    split = split_half_choice(validation.samples, seconds)
    return {
        "static": picked(static[validation.roots.setting]),
        "selector": picked(policy.argmax(-1)),
        "selector_expected": ((policy * efficiency).sum(-1), (policy * seconds).sum(-1)),
        **{name: picked(chosen) for name, chosen in rivals.items()},
        "split_half": tuple(x.view(2, -1).mean(0) for x in split),
        "same_half": picked((efficiency / seconds).argmax(-1)),
    }


def _picked(chosen: Tensor, efficiency: Tensor, seconds: Tensor) -> Steps:
    at = chosen[:, None]
    return efficiency.gather(-1, at)[:, 0], seconds.gather(-1, at)[:, 0]


def _rootward(choices: Choices) -> Tensor:
    """[C]: options whose tree has no trunk."""
    return torch.tensor([tree.l1 == 0 for tree in TREES]).repeat(len(choices.verifiers))


def _entropy_rule(training: Choices, validation: Choices, table: int) -> Tensor:
    chosen = torch.zeros(len(validation), dtype=torch.long)
    for setting in range(len(training.roots.settings)):
        here = validation.roots.setting == setting
        rule = EntropyRule.fit(training, table, setting)
        chosen[here] = rule.choose(validation.roots.scalars[here, ENTROPY])
    return chosen


def _named(index: int, choices: Choices) -> list:
    name, tree = option(index, choices.verifiers)
    return [*tree] if len(choices.verifiers) == 1 else [name, *tree]


def _counts(chosen: Tensor) -> list[tuple[int, int]]:
    return sorted(enumerate(torch.bincount(chosen).tolist()), key=lambda pair: -pair[1])


def _by_entropy(chosen: Tensor, choices: Choices, bins: int = 10) -> list[dict[str, float]]:
    """Mean shape of the chosen trees by the draft's entropy at the root, in bins of equally many roots."""
    entropy, shapes = choices.roots.scalars[:, ENTROPY], torch.tensor(TREES).float()[chosen % len(TREES)]
    groups = [group for group in entropy.argsort().tensor_split(bins) if len(group)]
    return [
        {
            "entropy": float(entropy[group].mean()),
            "depth": float(shapes[group, 1:].sum(-1).mean()),
            "trunk": float(shapes[group, 1].mean()),
            "nodes": float((shapes[group, 1] + shapes[group, 0] * shapes[group, 2]).mean()),
        }
        for group in groups
    ]


def _compare(steps: dict[str, Steps], prompt: Tensor, chosen: Tensor) -> dict:
    """Ratios of total throughput of the `chosen` [R] roots to the static option's, each [value, low, high]."""
    own = {name: (tokens[chosen], seconds[chosen]) for name, (tokens, seconds) in steps.items()}
    base = own.pop("static")
    resampled = resampling(prompt[chosen])
    per_root = (own["selector"][0] / own["selector"][1]) / (base[0] / base[1])
    worst = per_root.sort().values[: max(1, round(TAIL * len(per_root)))]
    return {
        "static_tps": float(base[0].sum() / base[1].sum()),
        "static_block_efficiency": float(base[0].mean()),
        "selector_block_efficiency": float(own["selector"][0].mean()),
        **{name: resampled(*method, *base) for name, method in own.items()},
        "over_domain": resampled(*own["selector"], *own["static_domain"]),
        "worst_5_percent": float(worst.mean()),
        "worst_quantiles": per_root.quantile(torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75])).tolist(),
    }
