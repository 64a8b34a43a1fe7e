"""Super-trees drawn by a generation engine: the trunk as one continuation, the branches as continuations of its prefixes."""

import torch
from torch import Tensor

from data.engines.base import Engine
from decoding.sampling import SamplingSetting
from decoding.super_tree import SuperTreeLayout


def tree_rollouts(
    engine: Engine, roots: list[list[int]], samples: int, layout: SuperTreeLayout, setting: SamplingSetting, seed: int
) -> Tensor:
    """Tokens [R * samples, N - 1] of `samples` super-trees behind each of R contexts that end with a root, root by root, in the
    layout's order of rows."""
    tokens = torch.empty(len(roots) * samples, len(layout), dtype=torch.long)
    if not roots:
        return tokens[:, 1:]
    if layout.l1:
        tokens[:, 1 : layout.l1 + 1] = engine.rollouts(roots, setting, layout.l1, samples, seed).flatten(0, 1)
    if layout.l2:
        prefixes = [
            [*roots[tree // samples], *trunk[:point]]
            for tree, trunk in enumerate(tokens[:, 1 : layout.l1 + 1].tolist())
            for point in range(layout.l1 + 1)
        ]
        branches = engine.rollouts(prefixes, setting, layout.l2, layout.k, seed + 1)
        tokens[:, layout.paths.flatten()] = branches.reshape(len(tokens), -1)
    return tokens[:, 1:]
