"""Branching probabilities B(f, X, t) of the top-down rules (Eq. 1, NDE paper), from the offers that
are sampled.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nde_talf.decoding.rules.bundles import Level, at_first, by_count, none_before
from nde_talf.decoding.rules.khisti import KhistiBranching
from nde_talf.decoding.rules.rules import NSS, Naive, Rule, SpecInfer
from nde_talf.decoding.rules.spectr import SpecTr


class Branching(Protocol):
    """Branching probabilities of one rule at rows of p, q [R, V]."""

    def contributions(self, level: Level) -> Tensor:
        """[B, S, K]: what each draw adds to B(f, X, its token); summing over equal tokens gives B.

        Zero for draws outside the subset.
        """
        ...

    def last(self, level: Level) -> Tensor:
        """[B, S, K]: the same in expectation over the children, given only how many a node has.

        Where the rule has a closed form for it, that is its acceptance rate, at the first draw of
        the node.
        """
        ...


class OfRule:
    """B(f, X, t) = sum_j A_j a_j 1{X_j = t} + A_k p_res(t): a_j is the chance of the j-th draw, A_j
    the probability that all before it were rejected, and the residual counts at the first draw of a
    token.

    p, q [R, V]; draws [R]: how many children row r has at most.
    """

    def __init__(self, rule: Rule, p: Tensor, q: Tensor, draws: Tensor):
        self.rule, self.states = rule, rule.table(p, q, draws)
        self.alpha = rule.alpha(p, q, draws, self.states)

    def contributions(self, level: Level) -> Tensor:
        rule, earlier = self.rule, level.earlier
        found = torch.zeros(earlier.shape, dtype=torch.float64, device=earlier.device)
        if rule.offered != 0:
            accept = rule.chance(
                level.px,
                level.qx,
                At(self.states, level, level.draws if rule.by_count else earlier),
            )
            if rule.offered is not None:
                accept = torch.where(earlier < rule.offered, accept, 0.0)
            found = accept * none_before(accept, level.siblings)
        if rule.lands:
            state = At(self.states, level, level.draws)
            landing = rule.landing(level.px, level.qx, state) * level.fresh
            if rule.offered != 0:
                landing *= torch.where(
                    level.same & level.member[None, :, None, :], 1 - accept[:, :, None, :], 1.0
                ).prod(-1)
            found = found + landing
        return found * level.member

    def last(self, level: Level) -> Tensor:
        return at_first(self.alpha, level)


class At:
    """A rule's states at every draw of a level after `count` [B, S, K] rejections; a field is
    looked up when it is asked for.
    """

    def __init__(self, states: Any, level: Level, count: Tensor):
        self._states, self._level, self._count = states, level, count

    def __getattr__(self, name: str) -> Tensor:
        field = getattr(self._states, name)
        return by_count(field, self._level, self._count.clamp(max=field.shape[1] - 1))


# (p, q [R, V], draws [R]) -> branching probabilities there.
BRANCHING: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "nss": partial(OfRule, NSS()),
    "naivetree": partial(OfRule, Naive()),
    "spectr": partial(OfRule, SpecTr()),
    "specinfer": partial(OfRule, SpecInfer()),
    "khisti": KhistiBranching,
}
