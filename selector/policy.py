"""NDE in the decode loop: a `TreePolicy` that asks the selector for (K, L1, L2) at every step."""

import time
from collections import Counter

import torch

from decoding.actions import TREES, Action
from decoding.drafter import Drafter
from decoding.errors import UserError
from decoding.features import scalar_features
from decoding.policies.base import DecodingState
from decoding.policies.delayed import draft_delayed
from decoding.sampling import Coins
from decoding.tree import DraftTree
from selector.latency import LatencyTable
from selector.selector import Selector


class NeuralPolicy:
    """The most probable tree of the selector's policy. `chosen` counts the actions taken, `seconds` is the last
    choice's own time. Raises UserError at the first step if the models' hidden sizes are not the selector's."""

    trees = "delayed"

    def __init__(self, selector: Selector, table: LatencyTable):
        self.selector = selector.eval()
        self.seconds = 0.0
        self.chosen: Counter[Action] = Counter()
        longest = 1 << 14  # one-token latencies by context, looked up instead of interpolated at every step
        self._passes = table.passes(torch.arange(longest)).float()

    def draft(self, state: DecodingState, drafter: Drafter, coins: Coins) -> DraftTree:
        started = time.perf_counter()
        action = self.choose(state, drafter)
        self.chosen[action] += 1
        self.seconds = time.perf_counter() - started
        return draft_delayed(action, state, drafter, coins)

    def choose(self, state: DecodingState, drafter: Drafter) -> Action:
        """argmax_a pi(a | root features)."""
        sizes = (len(state.h_previous), len(drafter.root.hidden))
        schema = self.selector.schema
        if sizes != (schema.target_hidden, schema.draft_hidden):
            raise UserError(
                f"selector: it was trained for hidden sizes {schema.target_hidden} (target) and {schema.draft_hidden} "
                f"(draft), but these models have {sizes[0]} and {sizes[1]}; load the selector of this pair."
            )
        self.selector.to(state.h_previous.device)  # nothing to do but at the first step
        statistics = scalar_features(state.p_previous, drafter.previous.q, drafter.root.q)
        local = torch.tensor([state.context, state.setting.temperature, state.setting.top_p])
        passes = self._passes[min(state.context, len(self._passes) - 1)]
        scalars = torch.cat([statistics, local.to(statistics), passes.to(statistics)])
        states = (state.h_previous, drafter.previous.hidden, drafter.root.hidden)
        logits = self.selector(*(h[None].float() for h in states), scalars[None].float())
        return TREES[int(logits.argmax())]
