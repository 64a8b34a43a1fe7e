"""Offline evaluation of a selector: throughput on held-out roots against the best static action.

The static action is fitted on training roots.
"""

from typing import Any

import torch
from torch import Tensor

from nde_talf.selector.network import Selector
from nde_talf.selector.roots import PricedRoots, setting_title, throughput_gain
from nde_talf.selector.training import pace_beside_static


@torch.inference_mode()
def evaluate_offline(
    selector: Selector, training: PricedRoots, validation: PricedRoots
) -> dict[str, Any]:
    """Compute held-out gains by sampling setting and over all of them.

    Throughputs are 1 over the mean of the estimated seconds per token
    (`nde_talf.selector.objective.best_static` says why). `selector` is the ratio of the selector's
    to the best static action's under the setting (chosen on the training roots), [value, low, high]
    with a 95 % bootstrap interval over prompts. Under settings for which that action was exported
    it is 1.

    Args:
        selector: in evaluation mode.
        training: roots that the static actions are fitted on.
        validation: held-out roots.
    """
    roots = validation.roots
    chosen, static = pace_beside_static(selector, validation, training.static())
    pace = torch.where(torch.tensor(selector.schema.learned)[roots.setting], chosen, static)

    def gain(here: Tensor) -> dict[str, list[float]]:
        return {"selector": throughput_gain(pace[here], static[here], roots.prompt[here])}

    settings = {
        setting_title(setting): gain(roots.setting == index)
        for index, setting in enumerate(roots.settings)
        if (roots.setting == index).any()
    }
    return {"settings": settings, "all": gain(torch.ones(len(roots), dtype=torch.bool))}
