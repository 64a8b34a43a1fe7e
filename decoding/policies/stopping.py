"""Paths and trunks of varying length without a trained selector.

They stop while drafting, or follow what was accepted.

Whether to draft on is chosen before the next token is drawn: by the tokens and the draft's
distributions so far, or by earlier steps. So every drafted token is a draw from q, and a node is
the last one or not whatever would be drawn after it. That is all that the rules for paths need.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, get_args

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.arguments import Natural, Positive, Proper, checked
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree

Criterion = Literal["largest", "drawn", "path"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)


@policy("confidence_stop", verifier="traversal")
class ConfidenceStop(TreePolicy):
    """Draft a path until the draft is unsure.

    For example `ConfidenceStop(0.4)` stops before a token whose distribution has no probability of
    0.4 or more.

    Args:
        threshold: the confidence below which the path ends.
        longest: the largest number of drafted tokens.
        by: what the confidence is. "largest": the largest probability at the end of the path
            (llama.cpp's p_min). "drawn": the probability of the token drawn last (transformers'
            assistant_confidence_threshold). "path": the product of these from the root on.
        pick: take the draft's most probable tokens, with an unwarped draft, in place of draws. For
            temperature 0, where a draft that is warped as the target is has a confidence of 1
            everywhere.
    """

    @checked
    def __init__(
        self,
        threshold: Proper = 0.4,
        longest: Positive = 20,
        by: Criterion = "largest",
        pick: bool = False,
    ):
        self.threshold, self.longest, self.by, self.pick = threshold, longest, by, pick
        self.trees = "top_k" if pick else "path"

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft a path that ends where the draft is no longer confident."""
        tree, confidence = DraftTree.rooted(state.root, drafter.root.q), 1.0
        for end in range(min(self.longest, state.room)):
            if end:
                drafter.expand(tree, [end])
            q = tree.q_at(end)
            if self.by == "largest" and float(q.max()) < self.threshold:
                break
            token = int(q.argmax()) if self.pick else rng.categorical(q)
            tree.add(end, token)
            if self.by == "largest":
                continue
            confidence = float(q[token]) * (confidence if self.by == "path" else 1.0)
            if confidence < self.threshold:
                break
        return tree


@policy("follow_mean", verifier="traversal")
class FollowMean(TreePolicy):
    """Path as long as the mean acceptance length of the last `window` steps, plus `plus`.

    For example, after steps that accepted 3, 4 and 5 tokens, window 3 and plus 1 draft 5 tokens. A
    sequence begins with a path of `longest`.
    """

    trees = "path"

    @checked
    def __init__(self, window: Positive = 4, plus: Natural = 1, longest: Positive = 8):
        self.window, self.plus, self.longest = window, plus, longest

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft a path of the mean accepted length, `plus` added."""
        accepted = state.memory.setdefault(self, deque(maxlen=self.window))
        if state.tau is not None:
            accepted.append(state.tau)
        mean = sum(accepted) / len(accepted) if accepted else self.longest
        length = min(max(round(mean) + self.plus, 1), self.longest)
        return draft_delayed(Action(1, 0, length), state, drafter, rng)
