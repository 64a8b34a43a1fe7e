"""NDE in the decode loop: a `TreePolicy` that asks the selector for (K, L1, L2), and perhaps the
verifier, at every step.
"""

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.device import asynchronous, upload
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.features import draft_rows, scalar_features
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.registry import DELAYED
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree, Verdict
from nde_talf.decoding.verifier import Verifier
from nde_talf.selector.fingerprint import fingerprint, same_model
from nde_talf.selector.latency import LONGEST, LatencyTable, StepCosts
from nde_talf.selector.network import Selector, selectable

Triple = tuple[Tensor, Tensor, Tensor]


class NeuralPolicy(TreePolicy):
    """The most probable option of the selector's policy.

    It holds no state of a sequence, so several sequences may share it.

    Attributes:
        verifier: for the decoder. The selector's only one, or a `Verifier` that applies the rule
            chosen for the step. That choice is made before anything is drafted, so each step is
            lossless by the proof of its own rule.
        counts: how often each option was taken, over all sequences since they were cleared.
        seconds: the part of the last draft that choosing took.
        rules: the selector's verifiers.
        shapes: of the trees that it may draft.

    Args:
        selector: as trained or loaded.
        table: prices the steps; None: the table that the selector was exported with. They are
            priced by the rule that it was trained under.

    Raises:
        UserError: there is no table; a verifier does not take delayed trees; or, at the first step,
            the models' hidden sizes are not the selector's.
    """

    trees = "delayed"

    def __init__(self, selector: Selector, table: LatencyTable | None = None):
        table = table or selector.table
        if table is None:
            raise UserError(
                "selector: it has no latency table, since an earlier version exported it: give"
                " NeuralPolicy one (LatencyTable.load), or train it again with stage=selector"
                " force=true."
            )
        self.selector = selector.eval()
        self.seconds = 0.0
        self.counts: Counter[int] = Counter()
        self._counting = Lock()
        self._costs = StepCosts(table, selector.schema.verifiers, LONGEST, selector.schema.pricing)
        # Compiled here, before any clock runs.
        on_cpu = any(selector.schema.learned) and not any(
            map(asynchronous, {x.device for x in selector.parameters()})
        )
        if on_cpu:
            from nde_talf.selector.compiled import (
                CompiledSelector,
            )  # not above: an engine of vLLM cannot start once numba is imported
        self._fast = CompiledSelector(selector, self._costs) if on_cpu else None
        self._openings: dict[tuple, Opening] = {}
        self.rules = selectable(selector.schema.verifiers, "selector")
        self.verifier = self.rules[0] if len(self.rules) == 1 else OfTheStep(self.rules[0])

    @property
    def draft_setting(self) -> SamplingSetting | None:
        """What drafts were warped with in training, for `SpeculativeDecoder`; None: as the target
        is.
        """
        if not (own := self.selector.schema.draft_setting):
            return None
        temperature, top_p = own
        return SamplingSetting(temperature, top_p)

    def check_decoder(
        self, target: CausalModel, drafter: Drafter | None, draft_setting: SamplingSetting | None
    ) -> None:
        """Warn where a decoder differs from what the selector was trained with: its text stays
        lossless, but the trees are chosen for others.
        """
        schema = self.selector.schema
        for role, model in (("target", target), ("draft", getattr(drafter, "model", None))):
            if (
                role in schema.pair
                and model is not None
                and not same_model(schema.pair[role], fingerprint(model))
            ):
                warnings.warn(
                    f"selector: it was trained for another {role} than {model.name}, so the trees"
                    " it chooses may be poor ones. The text stays lossless. Load the selector of"
                    " this pair, or train one (stage=selector).",
                    Advice,
                    stacklevel=3,
                )
        if schema.draft_setting != () and draft_setting != self.draft_setting:
            asked, known = (
                f"at {own}" if own else "as the target is"
                for own in (draft_setting, self.draft_setting)
            )
            warnings.warn(
                f"selector: it was trained on drafts warped {known}, and this decoder warps them"
                f" {asked}, so the trees it chooses may be poor. The text stays lossless. Give"
                " SpeculativeDecoder draft_setting=policy.draft_setting.",
                Advice,
                stacklevel=3,
            )

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | DeviceTree:
        started = time.perf_counter()
        index = self.choose(state, drafter)
        with self._counting:
            self.counts[index] += 1
        self.seconds = time.perf_counter() - started
        tree = draft_delayed(TREES[index % len(TREES)], state, drafter, rng)
        tree.rule = self.rules[
            index // len(TREES)
        ]  # the verifier finds it there, whatever was drafted in between
        return tree

    def actions(self) -> Counter[Action]:
        """Steps by action."""
        found: Counter[Action] = Counter()
        for index, steps in self.counts.items():
            found[TREES[index % len(TREES)]] += steps
        return found

    def choose(self, state: DecodingState, drafter: Drafter) -> int:
        """The most probable option of pi(. | root features); see
        `nde_talf.selector.network.action_at`.
        """
        opening = state.memory.get(self) or state.memory.setdefault(
            self, self._open(state, drafter)
        )
        return self._learned(state, drafter, opening) if opening.static is None else opening.static

    def _learned(self, state: DecodingState, drafter: Drafter, opening: "Opening") -> int:
        if self._fast and not asynchronous(state.p_previous.device):
            setting = state.setting
            return self._fast.choose(
                *self._inputs(state, drafter), state.context, setting.temperature, setting.top_p
            )
        return int(self._on_device(state, drafter, opening))

    def _on_device(self, state: DecodingState, drafter: Drafter, opening: "Opening") -> Tensor:
        device, setting, at = state.p_previous.device, state.setting, state.context
        context = at if isinstance(at, Tensor) else upload(torch.tensor([at]), device)
        return self._forward(
            *self._inputs(state, drafter), context, setting.temperature, setting.top_p, opening
        )

    def _forward(
        self,
        states: Sequence[Tensor],
        rows: tuple[Tensor, Tensor, Tensor],
        context: Tensor,
        temperature: float,
        top_p: float,
        opening: "Opening",
    ) -> Tensor:
        """[1]: the selector's own forward pass, where the models are not on a CPU."""
        at, seconds, passes = self._costs.row(context), opening.seconds, opening.passes
        setting = upload(torch.tensor([temperature, top_p]), context.device)
        local = torch.cat([context.float(), setting, passes.index_select(0, at)[0]])
        scalars = torch.cat([scalar_features(*rows).float(), local])
        return self.selector(
            *(h[None].float() for h in states), scalars[None], seconds.index_select(0, at)
        ).argmax(-1)

    def _inputs(self, state: DecodingState, drafter: Drafter) -> tuple[Triple, Triple]:
        """Hidden states and distributions, as `CompiledSelector.choose` takes them."""
        seen = state.h_previous[: self.selector.schema.target_hidden]
        return (seen, drafter.previous.hidden, drafter.root.hidden), (
            state.p_previous,
            *draft_rows(drafter),
        )

    def _open(self, state: DecodingState, drafter: Drafter) -> "Opening":
        """What stays the same for a sampling setting on a device, after a look whether the models
        are the selector's.
        """
        device, sizes = state.h_previous.device, (len(state.h_previous), len(drafter.root.hidden))
        if found := self._openings.get((state.setting, device, sizes)):
            return found
        schema = self.selector.schema
        if sizes != (schema.target_hidden or sizes[0], schema.draft_hidden):
            raise UserError(
                f"selector: it was trained for hidden sizes {schema.target_hidden} (target) and"
                f" {schema.draft_hidden} (draft), but these models have {sizes[0]} and {sizes[1]};"
                " load the selector of this pair."
            )
        static = self.selector.static_action(
            state.setting.temperature, state.setting.top_p, self._costs
        )
        self.selector.to(device)
        opening = Opening(
            static, *(upload(x, device) for x in (self._costs.seconds, self._costs.passes))
        )
        self._openings[state.setting, device, sizes] = opening
        return opening


class OfTheStep(Verifier):
    """Applies the verifier that was chosen with the tree, or else the `first`."""

    def __init__(self, first: Verifier):
        super().__init__("chosen", first.rule, DELAYED, first.on_device)

    def __call__(self, tree: DraftTree | DeviceTree, rng: Rng) -> Verdict:
        return tree.rule(tree, rng) if tree.rule else super().__call__(tree, rng)


class Opening(NamedTuple):
    """static: the one option of a setting, None where the network chooses; seconds, passes:
    `StepCosts`, on the device.
    """

    static: int | None
    seconds: Tensor
    passes: Tensor
