"""Labels of a micro-batch of super-trees, of which a few hold their distributions at a time."""

import torch
from torch import Tensor

from nde_talf.data.traces.super_trees import Draft, SuperTrees
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.names import ON_PATHS
from nde_talf.decoding.rules.labels import (
    Bundle,
    branch_gains,
    of_first_path,
    pooled,
    trunk_reach,
)
from nde_talf.decoding.sampling import SamplingSetting, warp
from nde_talf.decoding.super_tree import SuperTreeLayout


@torch.inference_mode()
def labels(
    trees: SuperTrees,
    target: CausalModel,
    draft: CausalModel | Draft,
    settings: list[tuple[SamplingSetting, SamplingSetting]],
    verifiers: list[str],
    layout: SuperTreeLayout,
    chunk: int,
) -> list[dict[str, Tensor]]:
    """Estimate E[tau + 1] [T, A] by verifier, for every (target's, draft's) sampling setting.

    Args:
        trees: with the hidden states of both models.
        target: reads its states out.
        draft: reads its states out.
        settings: pairs that the labels are for.
        verifiers: names of rules.
        layout: of the trees.
        chunk: rows of distributions at a time, at least those of a tree.

    Returns:
        For each setting, float32 estimates by the verifiers' names.
    """
    device, l1, paths = trees.tokens.device, layout.l1, layout.paths.to(trees.tokens.device)
    rules = dict.fromkeys(ON_PATHS.get(name, name) for name in verifiers)

    def together(tokens: Tensor, h_p: Tensor, h_q: Tensor) -> list[dict[str, Tensor]]:
        count, made, warped = len(tokens), [], {}
        # A row's draws: on the trunk the next token, below a branch point the K paths' tokens.
        trunk = tokens[:, 1 : l1 + 1].flatten()[:, None, None]
        steps = torch.arange(len(trunk), device=device)[:, None, None]
        first = layout.inner * torch.arange(count, device=device)[:, None, None, None]
        nodes = (layout.parents.to(device)[paths] + first).flatten(0, 1)
        p_logits = target.logits(h_p.flatten(0, 1)).float()
        q_logits = draft.logits(h_q.flatten(0, 1)).float()
        for setting, draft_setting in settings:
            if draft_setting not in warped:
                warped = {draft_setting: warp(q_logits, draft_setting)}
            laws = warp(p_logits, setting), warped[draft_setting]
            above = (law.view(count, layout.inner, -1)[:, :l1].flatten(0, 1) for law in laws)
            trunks = Bundle(*above, trunk, steps)
            branches = Bundle(*laws, tokens[:, paths].flatten(0, 1), nodes)
            estimates = {}
            for rule in rules:
                reach, alone = trunk_reach(trunks, count, rule)
                gains = branch_gains(branches, reach.flatten(), rule)
                estimates[rule] = pooled(reach, alone, gains, layout).float()
            estimates |= {
                name: of_first_path(estimates[rule])
                for name, rule in ON_PATHS.items()
                if rule in estimates
            }
            made.append(estimates)
        return made

    parts = zip(*(part.split(max(1, chunk // layout.inner)) for part in trees), strict=True)
    return [
        {name: torch.cat([part[name] for part in of_setting]) for name in verifiers}
        for of_setting in zip(*(together(*some) for some in parts), strict=True)
    ]
