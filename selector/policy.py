"""NDE in the decode loop: a `TreePolicy` that asks the selector for (K, L1, L2), and perhaps the verifier, at every step."""

import time
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from decoding.actions import TREES, Action
from decoding.device import asynchronous, upload
from decoding.drafter import Drafter
from decoding.errors import UserError
from decoding.features import scalar_features
from decoding.policies.base import DecodingState, Outlook
from decoding.policies.delayed import draft_delayed
from decoding.sampling import Coins, SamplingSetting
from decoding.tree import DraftTree, Verdict
from decoding.unread import UnreadTree
from decoding.verification import DELAYED, VERIFIERS, Verifier
from selector.fast import FastSelector
from selector.latency import LatencyTable, StepCosts
from selector.selector import Selector

LONGEST = 1 << 14  # tokens of context up to which steps are priced one by one


class NeuralPolicy:
    """The most probable option of the selector's policy.

    verifier: what goes with it into the decoder: the selector's one, or a `Verifier` that applies the one chosen for the step
    (chosen before anything is drafted, so that each step is lossless by its own verifier's proof). `counts` are those of the
    options taken, `seconds` is what choosing took of the last draft. Raises UserError at the first step if the models' hidden
    sizes are not the selector's.
    """

    trees = "delayed"

    def __init__(self, selector: Selector, table: LatencyTable):
        self.selector = selector.eval()
        self.seconds = 0.0
        self.counts: Counter[int] = Counter()
        self._costs = StepCosts(table, selector.schema.verifiers, LONGEST)
        self._prices = [self._costs.seconds, self._costs.passes]
        # Compiled here, before any clock runs.
        on_cpu = any(selector.schema.learned) and not any(map(asynchronous, {x.device for x in selector.parameters()}))
        self._fast = FastSelector(selector, self._costs) if on_cpu else None
        self._setting: SamplingSetting | None = None
        self._static: int | None = None  # the one option of this setting
        self._rules = [VERIFIERS[name] for name in selector.schema.verifiers]
        self._rule = self._rules[0]
        chosen = Verifier("chosen", self._verify, DELAYED, self._verify_unread)
        self.verifier = self._rule if len(self._rules) == 1 else chosen

    def draft(self, state: DecodingState, drafter: Drafter, coins: Coins) -> DraftTree | UnreadTree:
        started = time.perf_counter()
        index = self.choose(state, drafter) if state.choice is None else state.choice
        self.counts[index] += 1
        self._rule = self._rules[index // len(TREES)]
        self.seconds = time.perf_counter() - started
        return draft_delayed(TREES[index % len(TREES)], state, drafter, coins)

    def actions(self) -> Counter[Action]:
        """Steps by action."""
        found: Counter[Action] = Counter()
        for index, steps in self.counts.items():
            found[TREES[index % len(TREES)]] += steps
        return found

    def choose(self, state: DecodingState, drafter: Drafter) -> int:
        """The most probable option of pi(. | root features); see `selector.choices.option`."""
        self._open(state, drafter)
        return self._learned(state, drafter) if self._static is None else self._static

    def choice(self, outlook: Outlook, drafter: Drafter) -> Tensor | None:
        """The same [1] before the host knows the root; None where there is nothing to choose."""
        self._open(outlook, drafter)
        return self._forward(*_inputs(outlook, drafter)) if self._static is None else None

    def _learned(self, state: DecodingState, drafter: Drafter) -> int:
        if self._fast and not asynchronous(state.p_previous.device):
            return self._fast.choose(*_inputs(state, drafter))
        context = upload(torch.tensor([state.context]), state.p_previous.device)
        return int(self._forward(*_inputs(replace(state, context=context), drafter)))

    def _forward(self, states, rows, context: Tensor, temperature: float, top_p: float) -> Tensor:
        """[1]: the selector's own forward pass, where the models are not on a CPU."""
        at, (seconds, passes) = self._costs.row(context), self._prices
        setting = upload(torch.tensor([temperature, top_p]), context.device)
        local = torch.cat([context.float(), setting, passes.index_select(0, at)[0]])
        scalars = torch.cat([scalar_features(*rows).float(), local])
        return self.selector(*(h[None].float() for h in states), scalars[None], seconds.index_select(0, at)).argmax(-1)

    def _open(self, state: DecodingState | Outlook, drafter: Drafter) -> None:
        """What stays the same for a sampling setting, after a look whether the models are the selector's."""
        if state.setting is self._setting:
            return
        sizes = (len(state.h_previous), len(drafter.root.hidden))
        schema = self.selector.schema
        if sizes != (schema.target_hidden, schema.draft_hidden):
            raise UserError(
                f"selector: it was trained for hidden sizes {schema.target_hidden} (target) and {schema.draft_hidden} "
                f"(draft), but these models have {sizes[0]} and {sizes[1]}; load the selector of this pair."
            )
        self._setting = state.setting
        self._static = self.selector.static_option(state.setting.temperature, state.setting.top_p, self._costs)
        device = state.h_previous.device
        self.selector.to(device)
        self._prices = [upload(x, device) for x in (self._costs.seconds, self._costs.passes)]

    def _verify(self, tree: DraftTree, coins: Coins) -> Verdict:
        return self._rule(tree, coins)

    def _verify_unread(self, tree: UnreadTree, coins: Coins) -> tuple[Tensor, Tensor]:
        return self._rule.unread(tree, coins)


def _inputs(state: DecodingState | Outlook, drafter: Drafter) -> tuple:
    """What `FastSelector.choose` takes."""
    states = state.h_previous, drafter.previous.hidden, drafter.root.hidden
    rows = state.p_previous, drafter.previous.q, drafter.root.q
    return states, rows, state.context, state.setting.temperature, state.setting.top_p
