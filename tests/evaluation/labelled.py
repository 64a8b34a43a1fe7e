"""Training roots with labels under which given trees are best, and prices: what a plan of methods
is made from.
"""

import torch

from nde_talf.decoding.actions import TREES, Action, tree_index
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.roots import ROOT_SCALARS, Roots

SETTING = SamplingSetting(1.0)
TABLE = LatencyTable([1, 100], [1, 2], [1, 4], [[1.0, 1.0]] * 2, [[0.1, 0.1]] * 2)


def roots(best: dict[str, Action], count: int = 40) -> Roots:
    """Labels under which the tree of `best` is the best one for its rule, at every root."""
    labels = {rule: torch.ones(count, 2, len(TREES)) for rule in best}
    for rule, tree in best.items():
        labels[rule][:, :, tree_index(tree)] = 9.0
    return Roots(
        *(torch.zeros(count, size) for size in (16, 16, 16)),
        scalars=torch.rand(count, len(ROOT_SCALARS), generator=torch.Generator().manual_seed(0)),
        context=torch.full((count,), 50),
        setting=torch.zeros(count, dtype=torch.long),
        prompt=torch.arange(count) // 4,
        samples=labels,
        settings=[(1.0, 1.0)],
        kind=["code"] * count,
    )


BEST = {"specinfer": Action(1, 0, 4), "traversal": Action(2, 0, 3), "naivetree": Action(1, 0, 4)}
