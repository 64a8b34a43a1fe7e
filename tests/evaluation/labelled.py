"""Training roots with labels under which given trees are best, and prices: what a plan of methods
is made from.
"""

from dataclasses import replace

import torch

from nde_talf import Action, SamplingSetting
from nde_talf.decoding.actions import TREE_INDEX, TREES, canonical
from tests.selector import examples
from tests.selector.examples import TABLE

__all__ = ["BEST", "SETTING", "TABLE", "roots"]
SETTING = SamplingSetting(1.0)


def roots(best, count=40):
    """Labels under which the tree of `best` is the best one for its rule, at every root."""
    labels = {rule: torch.ones(count, 2, len(TREES)) for rule in best}
    for rule, tree in best.items():
        labels[rule][:, :, TREE_INDEX[canonical(tree)]] = 9.0
    return replace(examples.roots(count, 0), samples=labels, kind=["code"] * count)


BEST = {"specinfer": Action(1, 0, 4), "traversal": Action(2, 0, 3), "naivetree": Action(1, 0, 4)}
