"""NDE in the decode loop: a `TreePolicy` that asks the selector for (K, L1, L2), and perhaps the verifier, at every step."""

import time
from collections import Counter

import torch

from decoding.actions import Action
from decoding.drafter import Drafter
from decoding.errors import UserError
from decoding.policies.base import DecodingState
from decoding.policies.delayed import draft_delayed
from decoding.sampling import Coins
from decoding.tree import DraftTree, Verdict
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
        self.selector, self.table = selector.eval(), table
        self.seconds = 0.0
        self.chosen: Counter[Action] = Counter()
        self.chosen_verifiers: Counter[str] = Counter()
        self._fast: FastSelector | None = None
        names = selector.schema.verifiers
        self._rule = VERIFIERS[names[0]]
        self.verifier = self._rule if len(names) == 1 else Verifier("chosen", self._verify, DELAYED)

    def draft(self, state: DecodingState, drafter: Drafter, coins: Coins) -> DraftTree:
        started = time.perf_counter()
        name, action = self.choose(state, drafter)
        self.chosen[action] += 1
        self.chosen_verifiers[name] += 1
        self._rule = VERIFIERS[name]
        self.seconds = time.perf_counter() - started
        return draft_delayed(action, state, drafter, coins)

    def choose(self, state: DecodingState, drafter: Drafter) -> tuple[str, Action]:
        """argmax over options (verifier, tree) of pi(. | root features)."""
        if self._fast is None:
            self._fast = self._opened(state, drafter)
        previous, root = drafter.previous, drafter.root
        index = self._fast.choose(
            state.h_previous,
            previous.hidden,
            root.hidden,
            torch.stack([state.p_previous, previous.q, root.q]),
            state.context,
            state.setting.temperature,
            state.setting.top_p,
        )
        return option(index, self.selector.schema.verifiers)

    def _opened(self, state: DecodingState, drafter: Drafter) -> FastSelector:
        sizes = (len(state.h_previous), len(drafter.root.hidden))
        schema = self.selector.schema
        if sizes != (schema.target_hidden, schema.draft_hidden):
            raise UserError(
                f"selector: it was trained for hidden sizes {schema.target_hidden} (target) and {schema.draft_hidden} "
                f"(draft), but these models have {sizes[0]} and {sizes[1]}; load the selector of this pair."
            )
        self.selector.to(state.h_previous.device)
        return FastSelector(self.selector, StepCosts(self.table, schema.verifiers, LONGEST))

    def _verify(self, tree: DraftTree, coins: Coins) -> Verdict:
        return self._rule(tree, coins)
