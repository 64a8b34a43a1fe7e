"""What the labels say of static trees before anything is decoded: the best tree of a rule, and the
speed of a method.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.selector.baselines import MIN_ROOTS
from nde_talf.selector.latency import LatencyTable, context_counts
from nde_talf.selector.objective import mean_step, taken
from nde_talf.selector.roots import PricedRoots, Roots

SINGLE_PATH = torch.tensor([tree.k == 1 for tree in TREES])
DRAFTING = torch.tensor([tree.depth > 0 for tree in TREES])
# Whose labels give a rule its static tree, and among which trees. Of equal single-path labels any
# will do. Rules on trees come first: of equal methods the first one is decoded.
STATIC = {
    **{
        name: (name, DRAFTING)
        for name in ("specinfer", "traversal", "naivetree", "nss", "spectr", "khisti", "gbv")
    },
    "naive": ("naivetree", SINGLE_PATH),
    "bv": ("traversal", SINGLE_PATH),
}


@dataclass
class Predictions:
    """Labels of training roots and their prices.

    Attributes:
        roots: training roots with the labels of all rules; None where there is no draft model.
        table: prices their trees.
        timed: by rule and setting, the fastest of `ranked` in the decode loop, where these were
            timed.
    """

    roots: Roots | None
    table: LatencyTable | None
    timed: dict[tuple[str, SamplingSetting], Action] = field(default_factory=dict)
    _priced: dict[str, PricedRoots] = field(default_factory=dict, repr=False)

    def plain(self) -> tuple[float, float] | None:
        """Mean tokens and seconds a step of plain decoding; None without a table."""
        return (
            None
            if self.table is None
            else (1.0, float(self.table.plain(self.roots.context).mean()))
        )

    def static(self, verifier: str, setting: SamplingSetting) -> Action:
        """The tree with the most tokens per second on the roots traced under `setting`: by the
        clock where that was tried, else by the labels.
        """
        return self.timed.get((verifier, setting)) or self.ranked(verifier, setting, 1)[0]

    def ranked(
        self, verifier: str, setting: SamplingSetting, count: int, kind: str | None = None
    ) -> list[Action]:
        """The `count` trees with the most tokens per second by the labels, best first. kind: on the
        roots of one domain alone, where drafting nothing is a choice as well; none where that has
        too few roots.
        """
        labels, allowed = STATIC[verifier]
        priced, own = self.priced(labels), self.under(setting)
        if kind is not None:
            own = own[torch.tensor([self.roots.kind[i] == kind for i in own.tolist()])]
            if len(own) < MIN_ROOTS:
                return []
        pace = priced.costs[0].mean(context_counts(priced.roots.context[own])) / priced.mean_tokens(
            own
        )
        usable = allowed if kind is not None else allowed & DRAFTING
        return [
            TREES[i]
            for i in (
                pace.masked_fill(~usable, float("inf")).topk(count, largest=False).indices.tolist()
            )
        ]

    def step(self, labels: str, chosen: Tensor, setting: SamplingSetting) -> tuple[float, float]:
        """Mean tokens and seconds a step of a method that takes the trees `chosen` [R], indices
        into TREES, at the roots under `setting`, by the `labels` of a rule and its prices.
        """
        own, priced = self.under(setting), self.priced(labels)
        return mean_step(
            taken(priced.efficiency[own], chosen[own]), taken(priced.priced(0, own)[1], chosen[own])
        )

    def labelled(self, verifier: str, setting: SamplingSetting) -> str | None:
        """Whose labels predict static trees of `verifier` under `setting`; None where there are
        none.
        """
        labels = STATIC[verifier][0] if verifier in STATIC else verifier
        return labels if self.traced(setting) and labels in self.roots.samples else None

    def priced(self, labels: str) -> PricedRoots:
        """The roots with the labels of a rule and their prices, made once."""
        if labels not in self._priced:
            self._priced[labels] = PricedRoots.of(self.roots, [labels], [self.table])
        return self._priced[labels]

    def under(self, setting: SamplingSetting) -> Tensor:
        """Indices of the roots under `setting`."""
        return (self.roots.setting == self.index(setting)).nonzero()[:, 0]

    def traced(self, setting: SamplingSetting) -> bool:
        """Whether there are labels for it."""
        return self._indices(setting) != []

    def index(self, setting: SamplingSetting) -> int:
        """Which of the roots' settings it is. Raises UserError if it was not traced."""
        for index in self._indices(setting):
            return index
        raise UserError(
            f"{setting} was not traced, so there are no labels for it: add it to traces.settings."
        )

    def _indices(self, setting: SamplingSetting) -> list[int]:
        wanted = torch.tensor([setting.temperature, setting.top_p])
        return [
            index
            for index, pair in enumerate(self.roots.settings if self.roots else ())
            if torch.allclose(torch.tensor(pair), wanted)
        ]
