"""How much of the draft's proposals each OTLP solver accepts on real pairs of distributions, and the maximum that any could.

The pairs are taken along the target's own trajectories: `trajectory_trees`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from data.engines.transformers import TransformersEngine
from data.traces.super_trees import Prefix, SuperTrees, sampled_super_trees
from data.traces.trace import root_positions
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from decoding.super_tree import SuperTreeLayout, super_tree_layout
from decoding.verification.acceptance import acceptance, optimal_acceptance
from decoding.verification.branching import BRANCHING

OPTIMAL = "optimal (α*)"


@torch.inference_mode()
def trajectory_trees(
    target: CausalModel,
    draft: CausalModel,
    prompts: list[list[int]],
    setting: SamplingSetting,
    draft_setting: SamplingSetting,
    layout: SuperTreeLayout,
    samples: int = 1,
    stride: int = 16,
    new_tokens: int = 64,
    seed: int = 0,
) -> Iterator[SuperTrees]:
    """`samples` super-trees at a root every `stride` tokens of what the target writes after each prompt; the roots of one
    prompt at a time, root by root."""
    generator = torch.Generator().manual_seed(seed)
    trajectories = TransformersEngine(target).sample(prompts, setting, new_tokens, seed)
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        tokens = torch.tensor(trajectory, device=target.device)
        positions = torch.tensor(root_positions(prompt, trajectory, stride), device=target.device)
        if len(positions):
            prefixes = Prefix(target, tokens), Prefix(draft, tokens)
            yield from sampled_super_trees(
                *prefixes, tokens, positions, samples, layout, draft_setting, generator, len(positions) * samples
            )


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
