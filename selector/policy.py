"""NDE in the decode loop: a `TreePolicy` that asks the selector for a tree at every step."""

import time
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.device import upload
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.features import scalar_features
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.fingerprint import fingerprint, same_model
from nde_talf.selector.latency import LONGEST, LatencyTable, StepCosts
from nde_talf.selector.network import Selector


class NeuralPolicy(TreePolicy):
    """The most probable tree of the selector's policy.

    It holds no state of a sequence, so several sequences may share it.

    Attributes:
        table: by which steps are priced.
        verifier: for the decoder.
        counts: how often each tree was taken, over all sequences since they were cleared.
        seconds: the part of the last draft that choosing took.

    Args:
        selector: as trained or loaded.
        table: prices the steps; None: the table that the selector was exported with. They are
            priced by the rule that it was trained under.

    Raises:
        UserError: there is no table; a verifier does not take delayed trees; or, at the first step,
            the models' hidden sizes are not the selector's.
    """

    trees = "delayed"

    @checked
    def __init__(self, selector: Selector, table: LatencyTable | None = None):
        self.selector, self.table, schema = selector.eval(), selector.prices(table), selector.schema
        selector.network.float()  # the inputs' type, whatever the default one was at loading
        self.seconds = 0.0
        self.counts: Counter[int] = Counter()
        self._costs = StepCosts(self.table, schema.verifier, LONGEST, schema.pricing)
        self._openings: dict[tuple, Opening] = {}
        self.verifier = VERIFIERS[schema.verifier]

    @property
    def draft_setting(self) -> SamplingSetting | None:  # type: ignore[override]
        """Setting that drafts were warped with in training; None: the target's."""
        setting = self.selector.schema.draft_setting
        return SamplingSetting(*setting) if setting else None

    def check_decoder(self, target: Any, drafter: Drafter | None, draft_setting: Any) -> None:
        """Warn where a decoder differs from what the selector was trained with.

        Its text stays lossless, but the trees are chosen for others.
        """
        schema = self.selector.schema
        draft = None if drafter is None else drafter.model
        for role, model in (("target", target), ("draft", draft)):
            known = schema.pair.get(role)
            if known and model is not None and not same_model(known, fingerprint(model)):
                warnings.warn(
                    f"selector: it was trained for another {role} than {model.name}, so the trees"
                    " it chooses may be poor ones. The text stays lossless. Load the selector of"
                    " this pair, or train one (stage=selector).",
                    Advice,
                    stacklevel=3,
                )
        if schema.draft_setting != () and draft_setting != self.draft_setting:
            now, trained = (
                f"at {setting}" if setting else "as the target is"
                for setting in (draft_setting, self.draft_setting)
            )
            warnings.warn(
                f"selector: it was trained on drafts warped {trained}, and this decoder warps them"
                f" {now}, so the trees it chooses may be poor. The text stays lossless. Give"
                " SpeculativeDecoder draft_setting=policy.draft_setting.",
                Advice,
                stacklevel=3,
            )

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft the chosen tree."""
        started = time.perf_counter()
        index = self.choose(state, drafter)
        self.counts[index] += 1
        self.seconds = time.perf_counter() - started
        return draft_delayed(TREES[index], state, drafter, rng)

    def choose(self, state: DecodingState, drafter: Drafter) -> int:
        """Return the index in TREES of the most probable tree at a root."""
        opening = state.memory.get(self)
        if opening is None:
            opening = state.memory[self] = self._open(state, drafter)
        if opening.static is not None:
            return opening.static
        rows, setting = (state.p_previous, *drafter.seen()), state.setting
        at, size = self._costs.row(state.context), self.selector.schema.target_hidden
        known = state.context, setting.temperature, setting.top_p, *self._costs.passes[at].tolist()
        more = torch.tensor(known, dtype=torch.float32)
        scalars = [scalar_features(*rows).float(), upload(more, rows[0].device)]
        hidden = state.h_previous[:size], drafter.previous.hidden, drafter.root.hidden
        states = [h[None].float() for h in hidden]
        logits = self.selector(*states, torch.cat(scalars)[None], opening.seconds[at, None])
        return int(logits.argmax())

    def static(self, setting: SamplingSetting) -> int | None:
        """Return the tree that is always taken under a setting, or None: the network chooses."""
        return self.selector.static_action(setting.temperature, setting.top_p, self._costs)

    def _open(self, state: DecodingState, drafter: Drafter) -> "Opening":
        """Look once for a sampling setting and a device whether the models are the selector's."""
        device, sizes = state.h_previous.device, (len(state.h_previous), len(drafter.root.hidden))
        key, schema = (state.setting, device), self.selector.schema
        if sizes != (schema.target_hidden or sizes[0], schema.draft_hidden):
            raise UserError(
                f"selector: it was trained for hidden sizes {schema.target_hidden} (target) and"
                f" {schema.draft_hidden} (draft), but these models have {sizes[0]} and {sizes[1]};"
                " load the selector of this pair."
            )
        self.selector.to(device)
        if key not in self._openings:
            seconds = upload(self._costs.seconds, device)
            self._openings[key] = Opening(self.static(state.setting), seconds)
        return self._openings[key]


class Opening(NamedTuple):
    """One sampling setting on one device.

    static: the one tree that is taken; None where the network chooses. seconds: prices of all
    trees (`StepCosts`), on the device.
    """

    static: int | None
    seconds: Tensor
