"""Judging a selector offline: throughput on held-out roots against static actions and the split-half choice."""

import torch
from torch import Tensor

from decoding.actions import TREES
from selector.objective import split_half_choice
from selector.roots import Roots
from selector.selector import Selector
from selector.training import baselines


def offline_report(selector: Selector, training: Roots, validation: Roots, resamples: int = 1000) -> dict:
    """Held-out figures for each sampling setting and over all of them.

    Throughputs are sums of estimated tokens over sums of estimated seconds. Ratios are to the best static action of the
    setting (chosen on the training roots), with 95 % bootstrap intervals over prompts. `split_half` chooses
    root by root on one half of the super-trees and scores on the other: what these labels show that choosing can win. Label
    noise makes it an underestimate, so a selector that learns from many roots may exceed it.
    """
    rootward = torch.tensor([tree.l1 == 0 for tree in TREES])
    static, static_rootward = baselines(training), baselines(training, rootward)
    with torch.inference_mode():
        states = (validation.h_p_previous, validation.h_q_previous, validation.h_q_root)
        policy = selector(*states, validation.scalars).softmax(-1)
    settings = {}
    for index, (temperature, top_p) in enumerate(validation.settings):
        chosen = validation.setting == index
        if chosen.any():
            settings[f"temperature {temperature:g}, top-p {top_p:g}"] = {
                "roots": int(chosen.sum()),
                "static_tree": list(TREES[int(static[index])]),
                "static_l1_0_tree": list(TREES[int(static_rootward[index])]),
                **_compare(policy[chosen], validation.where(chosen), static, static_rootward, resamples),
            }
    actions = torch.bincount(policy.argmax(-1), minlength=len(TREES))
    return {
        "settings": settings,
        "all": _compare(policy, validation, static, static_rootward, resamples),
        "chosen": {str(tuple(TREES[i])): int(actions[i]) for i in actions.nonzero()[:, 0].tolist()},
        "training_roots": len(training),
        "validation_roots": len(validation),
    }


def _compare(policy: Tensor, roots: Roots, static: Tensor, static_rootward: Tensor, resamples: int) -> dict:
    """Ratios of total throughput, each [value, low, high]."""
    efficiency, seconds = roots.efficiency, roots.seconds

    def picked(action: Tensor) -> tuple[Tensor, Tensor]:
        at = action[:, None]
        return efficiency.gather(-1, at)[:, 0], seconds.gather(-1, at)[:, 0]

    base = picked(static[roots.setting])
    split = split_half_choice(roots.samples, seconds)
    split_half = tuple(x.view(2, -1).mean(0) for x in split)
    expected = ((policy * efficiency).sum(-1), (policy * seconds).sum(-1))
    methods = {
        "selector": picked(policy.argmax(-1)),
        "selector_expected": expected,
        "static_l1_0": picked(static_rootward[roots.setting]),
        "split_half": split_half,
    }
    ratios = {name: _ratio_interval(*method, *base, roots.prompt, resamples) for name, method in methods.items()}
    per_root = (methods["selector"][0] / methods["selector"][1]) / (base[0] / base[1])
    worst = per_root.sort().values[: max(1, round(0.05 * len(per_root)))]
    return {
        "static_tps": float(base[0].sum() / base[1].sum()),
        "static_block_efficiency": float(base[0].mean()),
        "selector_block_efficiency": float(methods["selector"][0].mean()),
        **ratios,
        "worst_5_percent": float(worst.mean()),
    }


def _ratio_interval(
    tokens: Tensor, seconds: Tensor, base_tokens: Tensor, base_seconds: Tensor, prompt: Tensor, resamples: int
) -> list[float]:
    """[ratio, low, high] of two throughputs, resampling whole prompts."""
    ids, group = prompt.unique(return_inverse=True)
    sums = torch.zeros(4, len(ids), dtype=torch.float64)
    for row, values in zip(sums, (tokens, seconds, base_tokens, base_seconds), strict=True):
        row.index_add_(0, group, values.double())
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(ids), (resamples, len(ids)), generator=generator)
    drawn = sums[:, draws].sum(-1)

    def ratio(x: Tensor) -> Tensor:
        return (x[0] / x[1]) / (x[2] / x[3])

    low, high = ratio(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [float(ratio(sums.sum(-1))), low, high]
