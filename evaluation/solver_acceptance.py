"""How much of the draft's proposals each OTLP solver accepts on real pairs of distributions, beside the most any could."""

import torch
from torch import Tensor

from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from decoding.super_tree import super_tree_layout
from decoding.verification.acceptance import acceptance, optimal_acceptance
from decoding.verification.branching import BRANCHING
from evaluation.trajectory_trees import trajectory_trees

OPTIMAL = "optimal (α*)"


def draft_paths(
    target: CausalModel,
    draft: CausalModel,
    prompts: list[list[int]],
    setting: SamplingSetting,
    draft_setting: SamplingSetting,
    depths: int,
    stride: int = 16,
    new_tokens: int = 64,
) -> tuple[Tensor, Tensor]:
    """p, q [R, depths, V] at the nodes of a path drawn from the draft, one at a root every `stride` tokens of the target's
    own trajectories."""
    layout = super_tree_layout(1, depths, 0)
    found = trajectory_trees(target, draft, prompts, setting, draft_setting, layout, 1, stride, new_tokens)
    rows = [trees.distributions(target, draft, setting, draft_setting) for trees in found]
    return torch.cat([p for p, _ in rows]), torch.cat([q for _, q in rows])


def acceptance_by_depth(p: Tensor, q: Tensor, k: int) -> dict[str, list[float]]:
    """Mean acceptance rate of every solver with k draws, and the optimum, at each depth of p, q [R, depths, V] (Figure 1
    of the NDE paper). Khisti's is the bound sum min(p, r)."""
    rates = {name: [float(acceptance(name, p[:, d], q[:, d], k).mean()) for d in range(p.shape[1])] for name in BRANCHING}
    return rates | {OPTIMAL: [float(optimal_acceptance(p[:, d], q[:, d], k).mean()) for d in range(p.shape[1])]}
