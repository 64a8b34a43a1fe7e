"""Best static trees of a rule by labels and prices, without decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.names import LABELLED, ON_PATHS
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import PricedRoots, Roots

MIN_ROOTS = 30
"""Fewest roots of a domain with a tree of its own."""
DRAFTING = torch.tensor([tree.depth > 0 for tree in TREES])
PATHS = torch.tensor([tree.k == 1 and tree.depth > 0 for tree in TREES])
STATIC = {
    **{rule: (rule, DRAFTING) for rule in ("specinfer", "traversal", *LABELLED)},
    **{rule: (labels, PATHS) for rule, labels in ON_PATHS.items()},
}
"""By rule, the labels for its static tree, and the allowed trees. Rules on trees come first: of
equal methods the first one is decoded.
"""


class Picked(NamedTuple):
    """A tree of the most probable tokens. options: its policy's name and settings, for files."""

    title: str
    policy: TreePolicy
    options: dict[str, Any]


PICKED = (
    *(
        Picked(f"SALF ({nodes} nodes)", Salf(nodes, batch=4), {"policy": "salf", "nodes": nodes})
        for nodes in (4, 8, 16)
    ),
    *(
        Picked(
            f"Beam ({k} wide, {depth} deep, {nodes} nodes)",
            Beam(k, depth, nodes),
            {"policy": "beam", "k": k, "depth": depth, "nodes": nodes},
        )
        for k, depth, nodes in ((1, 2, 2), (1, 4, 4), (1, 8, 8), (2, 4, 6), (3, 4, 8), (4, 4, 16))
    ),
)
"""Trees for temperature 0, where drawn branches coincide. The first is the default."""


def picked(options: dict[str, Any] | None) -> TreePolicy:
    """Return the tree for temperature 0 with these options, or the default."""
    return next((tree.policy for tree in PICKED if tree.options == options), PICKED[0].policy)


@dataclass
class StaticTrees:
    """Labels of the training roots under one sampling setting, with the prices of all trees.

    Attributes:
        roots: of all settings, with the labels of all rules.
        table: prices the trees.
        index: of the setting in `roots.settings`.
    """

    roots: Roots
    table: LatencyTable
    index: int
    _priced: dict[str, PricedRoots] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, roots: Roots | None, table: LatencyTable | None, setting: SamplingSetting
    ) -> "StaticTrees | None":
        """Make the labels of a setting; None if it was not traced."""
        if roots is None or table is None:
            return None
        index = traced_index(roots.settings, setting)
        return None if index is None else cls(roots, table, index)

    def ranked(self, rule: str, count: int, kind: str | None = None) -> list[Action]:
        """Return the `count` trees with the most tokens per second, best first.

        kind: on the roots of one domain alone; empty if it has too few roots.
        """
        labels, allowed = STATIC[rule]
        priced, here = self.priced(labels), (self.roots.setting == self.index).nonzero()[:, 0]
        if kind is not None:
            here = here[torch.tensor([self.roots.kind[i] == kind for i in here.tolist()])]
            if len(here) < MIN_ROOTS:
                return []
        pace = priced.mean_paces(here).masked_fill(~allowed, float("inf"))
        best = pace.topk(count, largest=False).indices
        return [TREES[i] for i in best.tolist()]

    def priced(self, labels: str) -> PricedRoots:
        """Return the roots with the labels of a rule, priced once."""
        if labels not in self._priced:
            self._priced[labels] = PricedRoots.of(self.roots, labels, self.table)
        return self._priced[labels]


def traced_index(settings: Sequence[tuple[float, float]], setting: SamplingSetting) -> int | None:
    """Return the index of a setting among traced (temperature, top-p), or None."""
    near = np.isclose(settings, (setting.temperature, setting.top_p)).all(-1)
    return int(near.argmax()) if near.any() else None
