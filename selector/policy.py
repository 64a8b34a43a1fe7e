"""NDE in the decode loop: a `TreePolicy` that asks the selector for a tree at every step."""

import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.features import scalar_features
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.network import Selector
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.step_costs import LONGEST, StepCosts


class NeuralPolicy(TreePolicy):
    """The most probable tree of the selector's policy.

    It holds no state of a sequence, so several sequences may share it.

    Attributes:
        table: by which steps are priced.
        verifier: for the decoder.
        counts: steps by chosen tree, over all sequences since they were cleared.
        seconds: of choosing, in the last draft.

    Args:
        selector: as trained or loaded.
        table: prices the steps; None: the table of the selector's export. The pricing rule is the
            training's.

    Raises:
        UserError: there is no table; a verifier does not take delayed trees; or, at the first step,
            the models' hidden sizes are not the selector's.
    """

    trees = "delayed"

    @checked
    def __init__(self, selector: Selector, table: LatencyTable | None = None):
        self.selector, self.table, schema = selector.eval(), selector.prices(table), selector.schema
        selector.network.float()  # the inputs' dtype, whatever torch's default was at loading
        self.seconds = 0.0
        self.counts: Counter[int] = Counter()
        self._costs = StepCosts(self.table, schema.verifier, LONGEST, schema.pricing)
        self._static: dict[SamplingSetting, int | None] = {}
        self.verifier = VERIFIERS[schema.verifier]

    def check_decoder(self, target: Any, drafter: Drafter | None, draft_setting: Any) -> None:
        """Warn where drafts are not warped as the target is, as in the selector's training.

        The text stays lossless, but its trees may be poor.
        """
        if draft_setting is not None:
            warnings.warn(
                "selector: it was trained on drafts warped as the target is, and this decoder warps"
                f" them at {draft_setting}, so the trees it chooses may be poor. The text stays"
                " lossless. Leave out SpeculativeDecoder's draft_setting.",
                Advice,
                stacklevel=3,
            )

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft the chosen tree."""
        started = time.perf_counter()
        action = self.delayed_tree(state) or self.chosen(int(self.choice(state, drafter)))
        self.seconds = time.perf_counter() - started
        return draft_delayed(action, state, drafter, rng)

    def delayed_tree(self, state: Any) -> Action | None:
        """Return the setting's static tree, or None where the network chooses."""
        static = self.static(state.setting)
        return None if static is None else self.chosen(static)

    def chosen(self, index: int) -> Action:
        """Count a tree, and return it."""
        self.counts[index] += 1
        return TREES[index]

    def choice(self, state: DecodingState, drafter: Drafter) -> Tensor:
        """Return the most probable tree at a root; see `TreePolicy.choice`."""
        setting, device = state.setting, state.h_previous.device
        if self not in state.memory:
            self._check_models(state, drafter)
            self.selector.to(device)
            state.memory[self] = self._costs.passes.to(device), self._costs.seconds.to(device)
        passes, seconds = state.memory[self]
        context: Any = state.context
        at = self._costs.row(context)
        statistics = scalar_features(state.p_previous, *drafter.seen()).float()
        request = context, setting.temperature, setting.top_p
        known = [
            x.to(statistics) if isinstance(x, Tensor) else statistics.new_full((1,), x)  # no upload
            for x in request
        ]
        scalars = torch.cat([statistics, *known, passes[at].view(-1)])[None]
        hidden = state.h_previous, drafter.previous.hidden, drafter.root.hidden
        states = [h[None].float() for h in hidden]
        return self.selector(*states, scalars, seconds[at].view(1, -1)).argmax(-1)

    def static(self, setting: SamplingSetting) -> int | None:
        """Return the static tree of a setting, or None where the network chooses."""
        if setting not in self._static:
            chosen = self.selector.static_action(setting.temperature, setting.top_p, self._costs)
            self._static[setting] = chosen
        return self._static[setting]

    def _check_models(self, state: DecodingState, drafter: Drafter) -> None:
        """Raise UserError unless the models' hidden sizes are the selector's."""
        sizes, schema = (len(state.h_previous), len(drafter.root.hidden)), self.selector.schema
        if sizes != (schema.target_hidden, schema.draft_hidden):
            raise UserError(
                f"selector: it was trained for hidden sizes {schema.target_hidden} (target) and"
                f" {schema.draft_hidden} (draft), but these models have {sizes[0]} and {sizes[1]};"
                " load the selector of this pair."
            )
