"""The selector and its network (Eq. 10, NDE paper)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading
from nde_talf.decoding.common.hub import export_folder
from nde_talf.selector.export import (
    CONFIG,
    FORMAT,
    VECTORS,
    read_export,
    unfit,
    write_export,
)
from nde_talf.selector.objective import best_static
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import INPUT_SCALARS
from nde_talf.selector.schema import SelectorSchema
from nde_talf.selector.step_costs import SPACING, StepCosts
from nde_talf.selector.vectors import check_vectors, vectors_of

PASSES, FARTHEST = 2, 2.0
"""Number of prices at the end of the scalars, and their clamp in standard deviations."""
CONTEXT = INPUT_SCALARS.index("context")


class SelectorNetwork(nn.Module):
    """Eq. 10: one logit for each tree.

    MLP([LN(phi_1 h_p_previous); LN(phi_2 h_q_previous); LN(phi_3 h_q_root); s(x)]).

    Args:
        schema: sizes of the states and layers, and dropout.
    """

    def __init__(self, schema: SelectorSchema):
        super().__init__()
        width, (first, second) = schema.width, schema.hidden
        states = schema.target_hidden, schema.draft_hidden, schema.draft_hidden
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(size, width), nn.LayerNorm(width)) for size in states
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
        """Return logits [B, A].

        Args:
            states: [B, H] each.
            scalars: [B, ...], standardised.
        """
        projected = [project(h) for project, h in zip(self.projections, states, strict=True)]
        return self.mlp(torch.cat([*projected, scalars], -1))


class Selector(nn.Module):
    """Logits over trees from raw features and the trees' seconds.

    The logits are sharpness x (network - log seconds): the network of Eq. 10 predicts the log of an
    action's expected tokens, and the machine's latency table gives its price. With sharpness 0 the
    logits are the network's alone, as in the NDE paper, which sees a machine by its one-token
    latencies only. `static_efficiency` [settings, A] is every action's mean E[tau + 1], and
    `static_contexts` [settings, G] counts the contexts of the training roots (`context_counts`):
    they give the best static action on any machine.

    table: the latency table of its training, or None; exported with it.
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
        """Fit the standardisation to training scalars [R, 11]; constants are only centred."""
        self.mean.copy_(scalars.mean(0))
        spread = scalars.std(0, correction=0)
        self.scale.copy_(torch.where(spread > 1e-6 * self.mean.abs() + 1e-12, 1 / spread, 1.0))

    def forward(
        self,
        h_p_previous: Tensor,
        h_q_previous: Tensor,
        h_q_root: Tensor,
        scalars: Tensor,
        seconds: Tensor,
    ) -> Tensor:
        """Return logits [B, A].

        Args:
            h_p_previous: [B, H_p].
            h_q_previous: [B, H_q].
            h_q_root: [B, H_q].
            scalars: [B, 11] in the order and units of INPUT_SCALARS.
            seconds: [B, A] of every action.
        """
        # Far from its training data a network's outputs mean nothing. So contexts are clamped to
        # the longest of training, and prices of passes, hundreds of deviations away on another
        # machine, to FARTHEST.
        scalars = scalars.clone()
        scalars[..., CONTEXT].clamp_(max=SPACING * self.static_contexts.shape[-1])
        known = (scalars - self.mean.float()) * self.scale.float()
        known[..., -PASSES:].clamp_(-FARTHEST, FARTHEST)
        outputs = self.network((h_p_previous, h_q_previous, h_q_root), known)
        sharpness = self.schema.sharpness
        return sharpness * (outputs - seconds.log()) if sharpness else outputs

    def static_action(self, temperature: float, top_p: float, costs: StepCosts) -> int | None:
        """Return the best static action, or None where the network chooses.

        The setting of training that is nearest to this one decides.
        """
        settings, pair = torch.tensor(self.schema.settings), torch.tensor([temperature, top_p])
        nearest = int((settings - pair).abs().sum(-1).argmin())
        if self.schema.learned[nearest]:
            return None
        seconds = costs.mean(self.static_contexts[nearest].cpu())
        return best_static(self.static_efficiency[nearest].cpu()[None], seconds[None])

    def prices(self, table: LatencyTable | None) -> LatencyTable:
        """Return `table`, or else the export's; raise UserError if there is neither."""
        prices = table or self.table
        if prices is None:
            raise UserError(
                "selector: it has no latency table: give one (LatencyTable.load), or train it again"
                " with stage=selector force=true."
            )
        return prices

    def save_pretrained(
        self,
        folder: str | Path,
        facts: Mapping[str, Any] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Export to a folder.

        Args:
            folder: what was there is replaced.
            facts: what it was trained on, for the model card.
            figures: throughputs on held-out roots, for the model card.
        """
        weights = {name: value.contiguous() for name, value in self.state_dict().items()}
        vectors = vectors_of(self)
        write_export(Path(folder), self.schema, weights, self.table, vectors, facts or {}, figures)

    @classmethod
    @checked
    def from_pretrained(cls, folder: str | Path) -> "Selector":
        """Load an export from its folder, or by its name on a hub.

        Raises:
            UserError: `folder` holds none, a damaged one, one of other inputs, or one of a verifier
                that takes no delayed trees.
        """
        folder = export_folder(folder)
        schema, weights, table = read_export(folder)
        # A new network draws its weights.
        with reading(folder / CONFIG, FORMAT.again), torch.random.fork_rng(devices=[]):
            selector = cls(schema)
        if (counts := weights.get("static_contexts")) is not None:  # a column per context seen
            selector.static_contexts = selector.static_contexts.repeat(1, counts.shape[-1])
        try:
            selector.load_state_dict(weights, assign=True)  # whatever torch's default type is
        except RuntimeError as error:
            raise unfit(folder, error) from error
        selector.table = table
        if (path := folder / VECTORS).exists():
            check_vectors(selector, path)
        return selector.eval()
