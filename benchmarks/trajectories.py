"""Acceptance of the draft's proposals by each OTLP solver, and the maximum that any could reach.

The pairs of distributions are taken along the target's own trajectories: `trajectory_trees`.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.acceptance import SOLVERS, acceptance, optimal_acceptance
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.traces.super_trees import (
    Draft,
    Prefix,
    SuperTrees,
    draft_prefix,
    super_trees,
)
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.sampling.rng import SamplingSetting, warp
from nde_talf.decoding.super_tree import SuperTreeLayout, super_tree_layout

OPTIMAL = "optimal (α*)"


NEW_TOKENS, STRIDE = 64, 16  # that the target writes after each prompt, and between roots


@torch.inference_mode()
def trajectory_trees(
    target: CausalModel,
    draft: CausalModel | Draft,
    prompts: list[list[int]],
    setting: SamplingSetting,
    draft_setting: SamplingSetting,
    layout: SuperTreeLayout,
    samples: int = 1,
    seed: int = 0,
) -> Iterator[SuperTrees]:
    """Draw `samples` super-trees at every 16th token of the target's texts.

    The roots of one prompt come at a time, root by root.
    """
    generator = torch.Generator().manual_seed(seed)
    trajectories = TransformersEngine(target).sample(prompts, setting, NEW_TOKENS, seed)
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        tokens = torch.tensor(trajectory, device=target.device)
        roots = torch.arange(len(prompt), len(trajectory), STRIDE, device=target.device)
        roots = roots.repeat_interleave(samples)
        uniforms = torch.rand(len(roots), len(layout), generator=generator, dtype=torch.float64)
        if len(roots):
            prefix = Prefix(target, tokens)
            both = prefix, draft_prefix(draft, prefix)
            yield super_trees(*both, roots, layout, draft_setting, uniforms, 1 << 30)


def draft_paths(
    target: CausalModel,
    draft: CausalModel | Draft,
    prompts: list[list[int]],
    setting: SamplingSetting,
    draft_setting: SamplingSetting,
    depths: int,
) -> tuple[Tensor, Tensor]:
    """p, q [R, depths, V] along a path of the draft at each root of `trajectory_trees`."""
    layout = super_tree_layout(1, depths, 0)
    drawn = list(trajectory_trees(target, draft, prompts, setting, draft_setting, layout))
    p = torch.cat([warp(target.logits(trees.h_p), setting) for trees in drawn])
    q = torch.cat([warp(draft.logits(trees.h_q), draft_setting) for trees in drawn])
    return p, q


def acceptance_by_depth(p: Tensor, q: Tensor, k: int) -> dict[str, list[float]]:
    """Mean acceptance rate of every solver with k draws, and the optimum, at each depth.

    p, q: [R, depths, V] (Figure 1 of the NDE paper). Khisti's is the bound sum min(p, r).
    """
    solvers = {name: partial(acceptance, name) for name in SOLVERS} | {OPTIMAL: optimal_acceptance}
    return {
        name: [float(rate(p[:, d], q[:, d], k).mean()) for d in range(p.shape[1])]
        for name, rate in solvers.items()
    }
