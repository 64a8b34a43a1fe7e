"""Super-trees drawn by a generation engine: the trunk as one continuation, the branches as continuations of its prefixes."""

import torch
from torch import Tensor

from data.engines import Engine
from decoding.sampling import SamplingSetting
from decoding.super_tree import SuperTreeLayout


def tree_rollouts(
    engine: Engine,
    trajectory: list[int],
    positions: list[int],
    samples: int,
    layout: SuperTreeLayout,
    setting: SamplingSetting,
    seed: int,
) -> Tensor:
    """Tokens [R * samples, N - 1] of `samples` super-trees behind each of R root positions of the trajectory, root by root, in
    the layout's order of rows."""
    roots = [trajectory[: position + 1] for position in positions]
    trunks = (
        engine.rollouts(roots, setting, layout.l1, samples, seed) if layout.l1 else torch.empty(len(roots), samples, 0).long()
    )
    tokens = torch.empty(len(roots) * samples, len(layout), dtype=torch.long)
    tokens[:, 1 : layout.l1 + 1] = trunks.flatten(0, 1)
    prefixes = [
        [*root, *trunk[:point]]
        for root, several in zip(roots, trunks.tolist(), strict=True)
        for trunk in several
        for point in range(layout.l1 + 1)
    ]
    if layout.l2:
        branches = engine.rollouts(prefixes, setting, layout.l2, layout.k, seed + 1)
        tokens[:, layout.paths.flatten()] = branches.reshape(len(tokens), -1)
    return tokens[:, 1:]
