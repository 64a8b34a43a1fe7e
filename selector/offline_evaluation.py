"""Offline evaluation of a selector: throughput on held-out roots against the best static action.

The static action is fitted on training roots. Two bounds estimate the most that choosing could win.
"""

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES
from nde_talf.selector.network import Selector
from nde_talf.selector.objective import split_half_choice
from nde_talf.selector.roots import PricedRoots, setting_title, throughput_gain


@torch.inference_mode()
def chosen_actions(selector: Selector, roots: PricedRoots, table: int) -> Tensor:
    """Return a selector's actions [R] under one latency table.

    The most probable ones, or the best static one under settings for which it was exported.
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

    - selector: the actions of `chosen_actions`.
    - split_half: chooses root by root on one half of the super-trees and scores on the other, which
      underestimates the possible gain, since labels are noisy; same_half: chooses and scores on the
      same labels, which overestimates it.

    Args:
        selector: in evaluation mode.
        training: roots that the static actions are fitted on.
        validation: held-out roots.
        table: index of the latency table.
    """
    roots, static = validation.roots, training.static()[table]
    efficiency, seconds = validation.efficiency, validation.seconds(table)
    baseline = validation.pace(static[roots.setting], table)
    tokens, times = split_half_choice(validation.samples, seconds)
    paces = {
        "selector": validation.pace(chosen_actions(selector, validation, table), table),
        "same_half": validation.pace((efficiency / seconds).argmax(-1), table),
        "split_half": (times / tokens).view(2, -1).mean(0),
    }

    def gains(here: Tensor) -> dict[str, list[float]]:
        return {
            name: throughput_gain(pace[here], baseline[here], roots.prompt[here])
            for name, pace in paces.items()
        }

    settings = {}
    for index, setting in enumerate(roots.settings):
        here = roots.setting == index
        if here.any():
            settings[setting_title(setting)] = {
                "roots": int(here.sum()),
                "learned": selector.schema.learned[selector.schema.settings.index(setting)],
                "static": [*TREES[int(static[index])]],
                **gains(here),
            }
    return {"settings": settings, "all": gains(torch.ones(len(roots), dtype=torch.bool))}
