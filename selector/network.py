"""The selector and its network (Eq. 10, NDE paper)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.arguments import Natural, Positive, Proper, checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import Amount, Share
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.verifier import Verifier
from nde_talf.selector.objective import best_static
from nde_talf.selector.prices import SPACING, LatencyTable, StepCosts
from nde_talf.selector.roots import INPUT_SCALARS, OF_TARGET

PASSES, FARTHEST = 2, 2.0
"""The last scalars are prices of passes; how many deviations from their mean the network reads."""
CONTEXT = INPUT_SCALARS.index("context")


def selectable(name: str, where: str) -> Verifier:
    """Return the rule called `name`, for which a selector may choose trees.

    Raises:
        UserError: naming the key or file `where`, for one that is not lossless on every delayed
            tree at every temperature: a selector drafts these.
    """
    fitting = [
        name for name, rule in VERIFIERS.items() if "delayed" in rule.trees and name != "greedy"
    ]
    if name not in fitting:
        why = "it does not take the 'delayed' trees that a selector drafts"
        if name not in VERIFIERS:
            why = "there is none of that name"
        elif name == "greedy":
            why = "it is lossless at temperature 0 only, where every rule decodes greedily"
        raise UserError(
            f"{where}: a selector cannot choose trees for {name}: {why}."
            f" Choose from {', '.join(fitting)}."
        )
    return VERIFIERS[name]


Role = Annotated[str, Field(pattern="^(target|draft)$")]
Setting = tuple[Annotated[float, Field(ge=0)], Share]
"""Temperature and top-p."""


@dataclass(frozen=True)
class SelectorSchema:
    """Models, rule and settings that a selector was made for.

    Raises UserError for a verifier that does not take delayed trees. The ranges are checked where
    an export is read.

    Attributes:
        target_hidden: size of the target's hidden states; 0: it looks at the draft's features
            alone.
        draft_hidden: size of the draft's hidden states.
        verifiers: the one whose trees it chooses.
        settings: (temperature, top-p) it was trained under.
        learned: for each of the settings, whether the network chooses; if not, choosing did not win
            there in cross-validation, and the best static action is taken.
        sharpness: see `Selector`.
        width: of the projections of the hidden states.
        hidden: widths of the two hidden layers.
        dropout: in training, after each of them.
        pricing: by which it chooses: "table", or "eq11", see `StepCosts`.
        draft_setting: (temperature, top-p) that drafts were warped with; None: as the target is;
            empty: not known.
        pair: fingerprints of the models, "target" and "draft"; empty: not known.
    """

    target_hidden: Natural
    draft_hidden: Positive
    verifiers: tuple[str]
    settings: tuple[Setting, ...]
    learned: tuple[bool, ...]
    sharpness: Amount = 20.0
    width: Positive = 128
    hidden: tuple[Positive, Positive] = (512, 32)
    dropout: Proper = 0.1
    pricing: Annotated[str, Field(pattern="^(table|eq11)$")] = "table"
    draft_setting: Setting | tuple[()] | None = ()
    pair: dict[Role, Annotated[list[float], Field(min_length=1)]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        selectable(self.verifier, "selector")
        if not 0 < len(self.settings) == len(self.learned):
            raise ValueError("'settings' and 'learned' are not of one length, above 0")
        if len({*self.settings}) < len(self.settings):
            raise ValueError("one of 'settings' is there twice")

    @property
    def verifier(self) -> str:
        """Name of the rule."""
        return self.verifiers[0]


class SelectorNetwork(nn.Module):
    """Eq. 10: one logit for each tree.

    MLP([LN(phi_1 h_p_previous); LN(phi_2 h_q_previous); LN(phi_3 h_q_root); s(x)]). A state of size
    0 is left out.

    Args:
        schema: sizes of the states and layers, and dropout.
    """

    def __init__(self, schema: SelectorSchema):
        super().__init__()
        width, (first, second) = schema.width, schema.hidden
        states = schema.target_hidden, schema.draft_hidden, schema.draft_hidden
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(size, width), nn.LayerNorm(width)) for size in states if size
        )
        self.mlp = nn.Sequential(
            nn.Linear(len(self.projections) * width + len(INPUT_SCALARS), first),
            nn.GELU(),
            nn.Dropout(schema.dropout),
            nn.Linear(first, second),
            nn.GELU(),
            nn.Dropout(schema.dropout),
            nn.Linear(second, len(TREES)),
        )

    def forward(self, states: Sequence[Tensor], scalars: Tensor) -> Tensor:
        """Logits [B, C].

        Args:
            states: [B, H] each.
            scalars: [B, ...], standardised.
        """
        known = [h for h in states if h.shape[-1]]
        projected = [project(h) for project, h in zip(self.projections, known, strict=True)]
        return self.mlp(torch.cat([*projected, scalars], -1))


class Selector(nn.Module):
    """Raw features and the trees' seconds in, logits over trees out.

    The logits are sharpness x (network - log seconds): the network of Eq. 10 predicts the log of
    how many tokens an action will yield, the machine's latency table says what it costs. With
    sharpness 0 they are the network's alone, as in the NDE paper, and a machine is known by its
    one-token latencies only. `static_efficiency` [settings, C] and `static_contexts` [settings, G]
    are every action's mean E[tau + 1] and the contexts of the training roots (`context_counts`),
    which give the best static action on any machine.

    table: the latency table that it was trained under, if it is known; exported with it.
    """

    mean: Tensor
    scale: Tensor
    static_efficiency: Tensor
    static_contexts: Tensor
    table: LatencyTable | None = None

    def __init__(self, schema: SelectorSchema):
        super().__init__()
        self.schema = schema
        self.network = SelectorNetwork(schema)
        self.register_buffer("mean", torch.zeros(len(INPUT_SCALARS)))
        self.register_buffer("scale", torch.ones(len(INPUT_SCALARS)))
        self.register_buffer(
            "static_efficiency",
            torch.ones(len(schema.settings), len(TREES), dtype=torch.float64),
        )
        self.register_buffer(
            "static_contexts", torch.ones(len(schema.settings), 1, dtype=torch.long)
        )

    def standardise(self, scalars: Tensor) -> None:
        """Fit the standardisation to training scalars [R, 11]; a constant one is only centred.

        Without target features, those that need the target become 0, whatever they are.
        """
        self.mean.copy_(scalars.mean(0))
        spread = scalars.std(0, correction=0)
        self.scale.copy_(torch.where(spread > 1e-6 * self.mean.abs() + 1e-12, 1 / spread, 1.0))
        if not self.schema.target_hidden:
            self.scale[OF_TARGET] = 0

    def forward(
        self,
        h_p_previous: Tensor,
        h_q_previous: Tensor,
        h_q_root: Tensor,
        scalars: Tensor,
        seconds: Tensor,
    ) -> Tensor:
        """Logits [B, C].

        Args:
            h_p_previous: [B, H_p].
            h_q_previous: [B, H_q].
            h_q_root: [B, H_q].
            scalars: [B, 11] in the order and units of INPUT_SCALARS.
            seconds: [B, C] of every action.
        """
        # Far from what it was trained on, a network's outputs mean nothing. So a longer context
        # counts as the longest of training, and the prices of passes, which on another machine lie
        # hundreds of deviations away, stay within FARTHEST.
        scalars = scalars.clone()
        scalars[..., CONTEXT].clamp_(max=SPACING * self.static_contexts.shape[-1])
        known = (scalars - self.mean.float()) * self.scale.float()
        known[..., -PASSES:].clamp_(-FARTHEST, FARTHEST)
        outputs = self.network((h_p_previous, h_q_previous, h_q_root), known)
        sharpness = self.schema.sharpness
        return sharpness * (outputs - seconds.log()) if sharpness else outputs

    def static_action(self, temperature: float, top_p: float, costs: StepCosts) -> int | None:
        """Return the one action that is taken under this sampling setting, or None.

        It is the best static one, where choosing did not win under the nearest known setting.
        """
        settings, pair = torch.tensor(self.schema.settings), torch.tensor([temperature, top_p])
        nearest = int((settings - pair).abs().sum(-1).argmin())
        if self.schema.learned[nearest]:
            return None
        seconds = costs.mean(self.static_contexts[nearest].cpu())
        return best_static(self.static_efficiency[nearest].cpu()[None], seconds[None])

    def prices(self, table: LatencyTable | None) -> LatencyTable:
        """Return `table`, or else the one of the export; raise UserError where there is none."""
        prices = table or self.table
        if prices is None:
            raise UserError(
                "selector: it has no latency table: give one (LatencyTable.load), or train it again"
                " with stage=selector force=true."
            )
        return prices

    def save_pretrained(self, folder: str | Path) -> None:
        """Export to a folder: see `nde_talf.selector.export`."""
        from nde_talf.selector.export import save_selector

        save_selector(self, Path(folder))

    @classmethod
    @checked
    def from_pretrained(cls, folder: str | Path) -> "Selector":
        """Load an export.

        Raises:
            UserError: `folder` holds none, or a damaged one: see `nde_talf.selector.export`.
        """
        from nde_talf.selector.export import load_selector

        return load_selector(Path(folder))
