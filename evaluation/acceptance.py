"""How much of the draft's proposals each OTLP solver accepts on real pairs of distributions, beside the most any could."""

import torch
from torch import Tensor

from data.super_trees import Prefix, scored_super_trees
from data.trajectories import sample_trajectories
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from decoding.super_tree import super_tree_layout
from decoding.verification.acceptance import BRANCHING, acceptance, optimal_acceptance

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
    layout, generator, parts = super_tree_layout(1, depths, 0), torch.Generator().manual_seed(0), []
    for prompt, trajectory in zip(prompts, sample_trajectories(target, prompts, setting, new_tokens, 0), strict=True):
        tokens = torch.tensor(trajectory, device=target.device)
        positions = torch.arange(len(prompt), len(trajectory), stride, device=target.device)
        if len(positions):
            with torch.inference_mode():
                prefixes = Prefix(target, tokens), Prefix(draft, tokens)
                parts += scored_super_trees(
                    *prefixes, tokens, positions, 1, layout, setting, draft_setting, len(positions), generator
                )
    return torch.cat([part.p for part in parts]), torch.cat([part.q for part in parts])


def acceptance_by_depth(p: Tensor, q: Tensor, k: int) -> dict[str, list[float]]:
    """Mean acceptance rate of every solver with k draws, and the optimum, at each depth of p, q [R, depths, V] (Figure 1,
    paper 000). Khisti's is the bound sum min(p, r)."""
    rates = {name: [float(acceptance(name, p[:, d], q[:, d], k).mean()) for d in range(p.shape[1])] for name in BRANCHING}
    return rates | {OPTIMAL: [float(optimal_acceptance(p[:, d], q[:, d], k).mean()) for d in range(p.shape[1])]}
