"""Super-trees along the target's own trajectories, for what is measured on real pairs of distributions."""

from collections.abc import Iterator

import torch

from data.engines.transformers import TransformersEngine
from data.traces.super_trees import Prefix, SuperTrees, sampled_super_trees
from data.traces.trace import root_positions
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from decoding.super_tree import SuperTreeLayout


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
) -> Iterator[SuperTrees]:
    """`samples` super-trees at a root every `stride` tokens of what the target writes behind each prompt; the roots of one
    prompt at a time, root by root."""
    generator = torch.Generator().manual_seed(0)
    trajectories = TransformersEngine(target).sample(prompts, setting, new_tokens, 0)
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        tokens = torch.tensor(trajectory, device=target.device)
        positions = torch.tensor(root_positions(prompt, trajectory, stride), device=target.device)
        if len(positions):
            prefixes = Prefix(target, tokens), Prefix(draft, tokens)
            yield from sampled_super_trees(
                *prefixes, tokens, positions, samples, layout, draft_setting, generator, len(positions) * samples
            )
