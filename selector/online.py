"""Rules that learn while they decode, which a selector has to beat: acceptance estimated and priced
by the token, and a bandit over a few trees.

What is learned of a sequence is its own (`DecodingState.memory`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nde_talf.decoding.actions import Action, tree_index
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy, require_positive
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.policies.stopping import draft_path
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.latency import LONGEST, LatencyTable, StepCosts

Prices = Callable[[Action, int], float]
"""Seconds of a step with a tree after so many committed tokens."""


def prices(table: LatencyTable, verifier: str) -> Prices:
    """Those of a latency table under a verifier, at the nearest of its grid's contexts."""
    costs = StepCosts(table, [verifier], LONGEST)
    seconds = costs.seconds.tolist()
    return lambda tree, context: seconds[costs.row(context)][tree_index(tree)]


@dataclass
class Learned:
    """What `OnlineAcceptance` knows of one sequence: its weights, and what it saw at each node of
    the last path.
    """

    weights: list[float]
    seen: list[list[float]] = field(default_factory=list)


class OnlineAcceptance(TreePolicy):
    """Draft a path while its next token is worth its price, by an online estimate of acceptance.

    A logistic regression predicts whether the next token will be accepted, from the draft's
    distribution there: its largest log-probability, its entropy, and the depth. After every step it
    learns which tokens were. With a the estimate at the end of the path, c the estimated
    probability that the path is accepted, and s(L) the seconds of a step with L drafted tokens, the
    path goes on while

        c a / (s(L + 1) - s(L)) >= (expected tokens so far) / s(L),

    that is while the next token brings more tokens a second than the step has. One token is always
    drafted, since nothing would be learned otherwise.

    Args:
        prices: s, by the path (1, 0, L) and the context.
        longest: the largest number of drafted tokens, at most 16.
        rate: the step size of the gradient.
        weights: [4] of a constant, the log-probability, the entropy (nats) and the depth, where
            every sequence begins.

    Attributes:
        last: the weights [4] that the last step of any sequence ended with; for example those to
            begin with after some training prompts.
    """

    trees = "path"

    def __init__(
        self,
        prices: Prices,
        longest: int = 16,
        rate: float = 0.1,
        weights: Sequence[float] = (1.5, 1.0, 0.0, 0.0),
    ):
        require_positive(longest=longest)
        if longest > 16:
            raise UserError(
                f"longest={longest}: it must be at most 16, the longest path of the action space."
            )
        if not 0 <= rate < math.inf:
            raise UserError(f"rate={rate}: it must be at least 0.")
        if len(weights) != 4:
            raise UserError(f"weights={list(weights)}: give four numbers.")
        self.prices, self.longest, self.rate, self.weights = prices, longest, rate, list(weights)
        self.last = self.weights

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        learned = state.memory.setdefault(self, Learned(list(self.weights)))
        if state.tau is not None:
            self._learn(learned, state.tau)
        weights, context = learned.weights, state.context
        seen: list[list[float]] = []
        reached, expected, seconds = 1.0, 1.0, self.prices(Action(1, 0, 0), context)

        def worth(q: Tensor) -> bool:
            nonlocal reached, expected, seconds
            at = observed(q, len(seen))
            reached *= sigmoid(weights, at)
            longer = self.prices(Action(1, 0, len(seen) + 1), context)
            if seen and reached * seconds < expected * (longer - seconds):
                return False
            seen.append(at)
            expected, seconds = expected + reached, longer
            return True

        tree = draft_path(state, drafter, rng, self.longest, worth)
        learned.seen = seen
        return tree

    def _learn(self, learned: Learned, tau: int) -> None:
        """One step of gradient for every drafted token that was looked at: the accepted ones, and
        the first rejected one.
        """
        weights = learned.weights
        for depth, at in enumerate(learned.seen[: tau + 1]):
            error = (depth < tau) - sigmoid(weights, at)
            weights = [w + self.rate * error * x for w, x in zip(weights, at, strict=True)]
        learned.weights = self.last = weights


def observed(q: Tensor, depth: int) -> list[float]:
    """What `OnlineAcceptance` looks at: 1, the largest log-probability of q [V], its entropy, and
    the depth.
    """
    entropy = -torch.xlogy(q, q).sum()
    return [1.0, *torch.stack([q.max().log(), entropy]).tolist(), float(depth)]


def sigmoid(weights: Sequence[float], at: Sequence[float]) -> float:
    """The estimated probability of acceptance."""
    score = sum(w * x for w, x in zip(weights, at, strict=True))
    return 1 / (1 + math.exp(-max(min(score, 30.0), -30.0)))


@dataclass
class Arms:
    """What `Bandit` knows of one sequence: how often each tree was taken, its tokens and its
    seconds, and the last one.
    """

    taken: list[int]
    tokens: list[float]
    seconds: list[float]
    last: int = 0


class Bandit(TreePolicy):
    """Upper confidence bounds over a few trees, in tokens a second: each tree once, then always the
    one whose mean, plus `width` sqrt(log t / n) times the best mean after n of t steps, is largest
    (after BanditSpec's UCB).

    Args:
        prices: seconds of a step by tree and context.
        arms: the trees.
        width: how much an untried tree is hoped for; 0 takes the best mean so far.
    """

    trees = "delayed"

    def __init__(self, prices: Prices, arms: Sequence[Action], width: float = 0.3):
        if not arms:
            raise UserError("arms=[]: give at least one tree.")
        if not 0 <= width < math.inf:
            raise UserError(f"width={width}: it must be at least 0.")
        self.prices, self.arms, self.width = prices, [Action(*arm) for arm in arms], width

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | DeviceTree:
        none = [0] * len(self.arms)
        arms = state.memory.setdefault(self, Arms(list(none), list(none), list(none)))
        if state.tau is not None:
            arms.taken[arms.last] += 1
            arms.tokens[arms.last] += state.tau + 1
            arms.seconds[arms.last] += self.prices(
                self.arms[arms.last], state.context - state.tau - 1
            )
        arms.last = self._best(arms)
        return draft_delayed(self.arms[arms.last], state, drafter, rng)

    def _best(self, arms: Arms) -> int:
        if 0 in arms.taken:
            return arms.taken.index(0)
        rates = [
            tokens / seconds for tokens, seconds in zip(arms.tokens, arms.seconds, strict=True)
        ]
        hope = self.width * max(rates) * math.sqrt(math.log(sum(arms.taken)))
        bounds = [
            rate + hope / math.sqrt(count) for rate, count in zip(rates, arms.taken, strict=True)
        ]
        return bounds.index(max(bounds))
