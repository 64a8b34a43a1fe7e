"""NDE in the decode loop: a `TreePolicy` that asks the selector for (K, L1, L2), and perhaps the verifier, at every step."""

import time
from collections import Counter

import torch
from torch import Tensor

from decoding.actions import Action
from decoding.device import asynchronous, upload
from decoding.drafter import Drafter
from decoding.errors import UserError
from decoding.features import scalar_features
from decoding.policies.base import DecodingState
from decoding.policies.delayed import draft_delayed
from decoding.sampling import Coins, SamplingSetting
from decoding.tree import DraftTree, Verdict
from decoding.unread import UnreadTree
from decoding.verification import DELAYED, VERIFIERS, Verifier
from selector.choices import option
from selector.fast import FastSelector
from selector.latency import LatencyTable, StepCosts
from selector.selector import Selector

LONGEST = 1 << 14  # tokens of context up to which steps are priced one by one


class NeuralPolicy:
    """The most probable option of the selector's policy.

    verifier: what goes with it into the decoder: the selector's one, or a `Verifier` that applies the one chosen for the step
    (chosen before anything is drafted, so that each step is lossless by its own verifier's proof). `chosen` counts the
    actions taken, `seconds` is the last choice's own time. Raises UserError at the first step if the models' hidden sizes
    are not the selector's.
    """

    trees = "delayed"

    def __init__(self, selector: Selector, table: LatencyTable):
        self.selector = selector.eval()
        self.seconds = 0.0
        self.chosen: Counter[Action] = Counter()
        self.chosen_verifiers: Counter[str] = Counter()
        self._costs = StepCosts(table, selector.schema.verifiers, LONGEST)
        self._fast: FastSelector | None = None
        self._remembered: dict[tuple[int, SamplingSetting], int | None] = {}
        self._opened = False
        names = selector.schema.verifiers
        self._rule = VERIFIERS[names[0]]
        unread = self._verify_unread if all(VERIFIERS[name].unread for name in names) else None
        self.verifier = self._rule if len(names) == 1 else Verifier("chosen", self._verify, DELAYED, unread)

    def draft(self, state: DecodingState, drafter: Drafter, coins: Coins) -> DraftTree | UnreadTree:
        started = time.perf_counter()
        name, action = self.choose(state, drafter)
        self.chosen[action] += 1
        self.chosen_verifiers[name] += 1
        self._rule = VERIFIERS[name]
        self.seconds = time.perf_counter() - started
        return draft_delayed(action, state, drafter, coins)

    def choose(self, state: DecodingState, drafter: Drafter) -> tuple[str, Action]:
        """The most probable option (verifier, tree) of pi(. | root features)."""
        if not self._opened:
            self._open(state, drafter)
        index = self._static(state)
        if index is None:
            index = self._learned(state, drafter)
        return option(index, self.selector.schema.verifiers)

    def _static(self, state: DecodingState) -> int | None:
        """The best static option, where that is what was exported for the nearest sampling setting."""
        at, setting = self._costs.row(state.context), state.setting
        if (at, setting) not in self._remembered:
            seconds = self._costs.seconds[at]
            self._remembered[at, setting] = self.selector.static_option(setting.temperature, setting.top_p, seconds)
        return self._remembered[at, setting]

    def _learned(self, state: DecodingState, drafter: Drafter) -> int:
        states = state.h_previous, drafter.previous.hidden, drafter.root.hidden
        rows = state.p_previous, drafter.previous.q, drafter.root.q
        local = state.context, state.setting.temperature, state.setting.top_p
        return (self._fast.choose if self._fast else self._forward)(states, rows, *local)

    def _forward(self, states, rows, context: int, temperature: float, top_p: float) -> int:
        """The selector's own forward pass, where the models are not on a CPU."""
        at, device = self._costs.row(context), rows[0].device
        local = upload(torch.tensor([context, temperature, top_p, *self._costs.passes[at].tolist()]), device)
        scalars = torch.cat([scalar_features(*rows).float(), local])
        seconds = upload(self._costs.seconds[at], device)
        return int(self.selector(*(h[None].float() for h in states), scalars[None], seconds[None]).argmax())

    def _open(self, state: DecodingState, drafter: Drafter) -> None:
        sizes = (len(state.h_previous), len(drafter.root.hidden))
        schema = self.selector.schema
        if sizes != (schema.target_hidden, schema.draft_hidden):
            raise UserError(
                f"selector: it was trained for hidden sizes {schema.target_hidden} (target) and {schema.draft_hidden} "
                f"(draft), but these models have {sizes[0]} and {sizes[1]}; load the selector of this pair."
            )
        self.selector.to(state.h_previous.device)
        if not asynchronous(state.h_previous.device):
            self._fast = FastSelector(self.selector, self._costs)
        self._opened = True

    def _verify(self, tree: DraftTree, coins: Coins) -> Verdict:
        return self._rule(tree, coins)

    def _verify_unread(self, tree: UnreadTree, coins: Coins) -> tuple[Tensor, Tensor]:
        return self._rule.unread(tree, coins)
